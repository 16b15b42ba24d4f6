"""A device's share of a step: what kernels count there is what a CPU's walk counts, and a weight is looked at once."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.kernels.fused.launch import Again
from narrowgauge.compute.kernels.fused.watched import looks as room
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, ROWWISE
from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.held import TIMED, Held, lies_as

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


def by_hand(site, device, held):
    return nullcontext()


def steps(looks, count):
    """Steps of one room, and numbers for them."""
    torch.manual_seed(0)
    for turn in range(count):
        yield Held(turn, 0, lambda: looks), 10.0**-turn * torch.randn(40, 64, device=DEVICE)


def packed(turn, rule, given, *tensors):
    _, looks = held()
    fresh = Held(turn, 0, lambda: looks)
    for number, x in enumerate(tensors):
        assert fresh.judge_there(f"{number}:input", "input", x, rule, given)
    return fresh.operands(looks)[1]


@pytest.mark.parametrize("kind", ["own", "rows", "given"])
def test_looks_that_were_filled_before_are_filled_by_the_shorter_way(kind):
    rule = (ROWWISE if kind == "rows" else CURRENT).uses("input")[0]
    given = Given(None, torch.tensor(300.0, device=DEVICE)) if kind == "given" else None
    _, looks = held()
    for turn, (step, x) in enumerate(steps(looks, 5)):
        lies = lies_as(x, rule)
        assert not step.again_there("a:input", False, x, lies, given, by_hand)  # nobody opened the step's room
        assert step.judge_there("a:input", "input", x, rule, given)
        for scaled in (x, 3 * x):  # microbatches
            short = step.again_there("b:input", False, scaled, lies, given, by_hand)
            assert short == (turn > 1)  # they were filled twice
            assert short or step.judge_there("b:input", "input", scaled, rule, given)
        found = step.operands(looks)[1]
        first, second, third = packed(turn, rule, given, x, x, 3 * x)
        assert torch.equal(found[0].nan_to_num(), first.nan_to_num())
        for name in ("amax", "numel", "xx", "ee"):
            merged = max if name == "amax" else sum
            place = MOMENTS[name]
            assert found[1, place].item() == pytest.approx(merged([second[place].item(), third[place].item()])), name


def test_what_a_look_was_not_filled_for_goes_the_whole_way():
    rule, other = CURRENT.uses("input")[0], CURRENT.uses("grad_output")[0]
    _, looks = held()
    *before, (step, x), (later, _), (last, _) = steps(looks, 6)
    for early, y in before:
        for site in ("a:weight", "b:weight"):
            assert early.judge_there(site, site[2:], y, rule, None)
        early.operands(looks)
    lies, given = lies_as(x, rule), Given(None, torch.tensor(300.0, device=DEVICE))
    assert step.judge_there("a:input", "input", x, rule, None)
    assert not step.again_there("b:weight", True, x, lies, given, by_hand)  # a scale of its own before
    apart = torch.empty(40 * 64 + 1, device=DEVICE)[1:].view(40, 64)
    assert not step.again_there("b:weight", True, apart, lies, None, by_hand)  # Triton has another kernel for it
    assert not step.again_there("b:weight", True, x, lies_as(x, other), None, by_hand)
    assert not step.again_there("b:weight", True, x[:20], lies_as(x[:20], rule), None, by_hand)
    assert step.again_there("b:weight", True, x, lies, None, by_hand)
    assert step.again_there("b:weight", True, x, lies, None, by_hand)  # once
    assert not step.again_there("c:input", False, x, lies, None, by_hand)  # of a third look nothing is known
    assert step.operands(looks)[0] == ["a:input", "b:weight"]
    for site in ("a:input", "b:input"):
        assert later.judge_there(site, "input", x.bfloat16(), other, None)
    later.operands(looks)
    assert last.judge_there("a:input", "input", x, rule, None)
    assert not last.again_there("b:weight", True, x, lies, None, by_hand)  # it was another's meanwhile


@pytest.mark.parametrize(
    ("recipe", "given"),
    [(CURRENT, False), (CURRENT, True), (ROWWISE, False), (BLOCKWISE, False)],
    ids=["current", "given", "rowwise", "blockwise"],
)
def test_a_look_that_rows_apart_or_turned_ones_filled_meanwhile_is_filled_by_the_whole_way(recipe, given):
    rule, _ = recipe.uses("input")
    scale = Given(None, torch.tensor(300.0, device=DEVICE)) if given else None
    _, looks = held()
    ways = []
    for turn, lies in enumerate("cccrrrccctttccc"):
        wide = torch.randn(40, 128, device=DEVICE)
        x = {"c": wide[:, :64].contiguous(), "r": wide[:, :64], "t": wide[:, :64].t().contiguous().t()}[lies]
        step = Held(turn, 0, lambda: looks)
        assert step.judge_there("0:input", "input", x, rule, scale)
        short = lies == "c" and step.again_there("1:input", False, x, lies_as(x, rule), scale, by_hand)
        ways.append(short)
        assert short or step.judge_there("1:input", "input", x, rule, scale)
        found, want = step.operands(looks)[1], packed(turn, rule, scale, x, x)
        assert torch.equal(found.nan_to_num(), want.nan_to_num()), turn
    assert ways[2]
    assert not ways[6]


def test_a_launch_that_fails_leaves_no_row(monkeypatch):
    rule = CURRENT.uses("input")[0]
    _, looks = held()
    *before, (step, x) = steps(looks, 4)
    for early, y in before:
        for site in ("a:input", "b:weight"):
            assert early.judge_there(site, site[2:], y, rule, None)
        early.operands(looks)
    assert step.judge_there("a:input", "input", x, rule, None)
    with monkeypatch.context() as patch:
        patch.setattr(Again, "__call__", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.again_there("b:weight", True, x, lies_as(x, rule), None, by_hand)
    assert step.judge_there("b:weight", "weight", x, rule, None)  # it was not seen
    assert step.operands(looks)[0] == ["a:input", "b:weight"]
