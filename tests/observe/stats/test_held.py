"""A device's share of a step: what kernels count there is what a CPU's walk counts, and a weight is looked at once."""

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused.watched import looks as room
from narrowgauge.compute.recipes import CURRENT, ROWWISE
from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.held import TIMED, Held

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def held():
    looks = room.Looks(DEVICE)
    return Held(0, 0, lambda: looks), looks


@pytest.mark.parametrize("recipe", [CURRENT, ROWWISE], ids=lambda recipe: recipe.name)
def test_a_gpus_rows_are_a_cpus(recipe):
    there, looks = held()
    here = Held(0, 2, looks=lambda: pytest.fail("a CPU has no looks"))
    torch.manual_seed(0)
    for role in ("input", "weight"):
        for _ in range(2):  # microbatches
            x, rule = torch.randn(40, 64), recipe.uses(role)[0]
            assert there.judge_there(f"a:{role}", role, x.to(DEVICE), rule, None)
            assert here.judge(f"a:{role}", role, x, rule)
    sites, found = there.operands(looks)
    names, want = here.operands(None)
    assert sorted(sites) == sorted(names) == ["a:input", "a:weight"]
    for name in ("numel", "amax", "amin", "n", "flushed", "xx", "dd"):
        a = dict(zip(sites, found[:, MOMENTS[name]].flatten().tolist(), strict=True))
        b = dict(zip(names, want[:, MOMENTS[name]].flatten().tolist(), strict=True))
        assert a == pytest.approx(b, rel=1e-5), name
    assert dict(zip(names, want[:, MOMENTS["numel"]].flatten().tolist(), strict=True)) == {
        "a:input": 2 * 40 * 64,
        "a:weight": 40 * 64,
    }
    assert looks.pack()[0] == []  # the next step's are its own


def test_what_fails_is_not_packed(monkeypatch):
    there, looks = held()
    x, rule = torch.randn(40, 64, device=DEVICE), CURRENT.uses("weight")[0]
    with monkeypatch.context() as patch:
        patch.setattr("narrowgauge.observe.stats.held.count", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            there.judge_there("a:weight", "weight", x, rule, None)
    assert there.judge_there("a:weight", "weight", x, rule, None)  # it was not seen
    assert there.judge_there("a:weight", "weight", x, rule, None)
    sites, found = there.operands(looks)
    assert sites == ["a:weight"]
    assert found[0, MOMENTS["numel"]] == x.numel()


def test_without_room_somebody_else_has_to_look(monkeypatch):
    monkeypatch.setattr(room, "LOOKS", 1)
    there, looks = held()
    x, rule = torch.randn(40, 64, device=DEVICE), CURRENT.uses("input")[0]
    assert there.judge_there("a:input", "input", x, rule, None)
    assert not there.judge_there("b:input", "input", x, rule, None)
    assert there.operands(looks)[0] == ["a:input"]
    assert there.results() == ([], None)


def test_one_tensor_of_some_is_timed_for_all_of_them_and_in_every_step_another():
    n = 4 * TIMED
    timed = []
    for turn in range(TIMED):
        there = Held(turn, 0, looks=lambda: pytest.fail("not asked"))
        found = [at for at in range(n) if there.is_timed()]
        assert len(found) * TIMED == n
        timed += found
    assert timed[0] == 0
    assert sorted(timed) == list(range(n))


def test_the_tensor_in_whose_time_kernels_are_compiled_stands_for_none_but_itself():
    assert [Held(turn, 0, looks=list).times for turn in range(3)] == [1, TIMED, TIMED]
