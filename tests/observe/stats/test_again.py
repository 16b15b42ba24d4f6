"""The shortest way counts what the whole way does, or leaves it to that."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.kernels.fused.launch import Again
from narrowgauge.compute.kernels.fused.watched import looks as room
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, ROWWISE
from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.again import Gate, Watched, here, there
from narrowgauge.observe.stats.held import Held, lies_as

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULE = CURRENT.uses("input")[0]


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    """Triton's interpreter has no current device."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)


def fails(site, error):
    raise error


def held():
    looks = room.Looks(DEVICE)
    return Held(0, 0, lambda: looks), looks


def by_hand(site, device, held):
    return nullcontext()


def shorter(step, site, x, rule, given=None):
    """Whether a tensor goes the short way, of a site that was judged by the rule as it lay so."""
    watched = Watched(fails, open=True, held={x.device: step})
    again = there(watched, Gate(), site, site.endswith("weight"), x, lies_as(x, rule), rule, by_hand)
    return again(x, rule, given)


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
        assert not shorter(step, "a:input", x, rule, given)  # nobody opened the step's room
        assert step.judge_there("a:input", "input", x, rule, given)
        for scaled in (x, 3 * x):  # microbatches
            short = shorter(step, "b:input", scaled, rule, given)
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
    given = Given(None, torch.tensor(300.0, device=DEVICE))
    assert step.judge_there("a:input", "input", x, rule, None)
    assert not shorter(step, "b:weight", x, rule, given)  # a scale of its own before
    apart = torch.empty(40 * 64 + 1, device=DEVICE)[1:].view(40, 64)
    assert not shorter(step, "b:weight", apart, rule)  # Triton has another kernel for it
    assert not shorter(step, "b:weight", x, other)
    assert not shorter(step, "b:weight", x[:20], rule)
    assert shorter(step, "b:weight", x, rule)
    assert shorter(step, "b:weight", x, rule)  # once
    assert not shorter(step, "c:input", x, rule)  # of a third look nothing is known
    assert step.operands(looks)[0] == ["a:input", "b:weight"]
    for site in ("a:input", "b:input"):
        assert later.judge_there(site, "input", x.bfloat16(), other, None)
    later.operands(looks)
    assert last.judge_there("a:input", "input", x, rule, None)
    assert not shorter(last, "b:weight", x, rule)  # it was another's meanwhile


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested)")
@pytest.mark.parametrize(
    "other", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda x: torch.nested.nested_tensor([x, x])]
)
def test_what_is_no_dense_matrix_any_more_goes_the_whole_way(other):
    _, looks = held()
    *before, (step, x) = steps(looks, 4)
    for early, y in before:
        assert early.judge_there("a:input", "input", y, RULE, None)
        early.operands(looks)
    step.room = looks
    watched = Watched(fails, open=True, held={x.device: step})
    again = there(watched, Gate(), "a:input", False, x, lies_as(x, RULE), RULE, by_hand)
    assert not again(other(x), RULE, None)
    assert again(x, RULE, None)


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
        short = lies == "c" and shorter(step, "1:input", x, rule, scale)
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
            shorter(step, "b:weight", x, rule)
    assert step.judge_there("b:weight", "weight", x, rule, None)  # it was not seen
    assert step.operands(looks)[0] == ["a:input", "b:weight"]


def way(x, gate=None, site="a:input"):
    """A short way on the CPU for what lies as x does, and the step that it counts into."""
    assert host.wait()
    step = Held(3, 4, looks=lambda: pytest.fail("a CPU has no looks"))
    watched = Watched(fails, open=True, held={torch.device("cpu"): step})
    rows = x.reshape(-1, x.shape[-1])
    known = host.as_before(rows.detach(), RULE, (2, 1))
    return here(watched, gate or Gate(), site, site.endswith("weight"), x, known, RULE), watched, step


def test_the_short_way_counts_what_the_walk_does():
    x = torch.randn(3, 20, 64)
    again, watched, step = way(x)
    assert again(3 * x, RULE, None)
    assert watched.seconds > 0
    sites, found = step.operands(None)
    want = host.judge(3 * x.view(60, 64), RULE, (3 % 2, 2), (0, 1))
    assert sites == ["a:input"]
    assert torch.equal(found[0], torch.from_numpy(want.vector))


def test_a_weight_is_counted_once():
    x = torch.randn(20, 64)
    again, _, step = way(x, site="a:weight")
    assert again(x, RULE, None)
    assert again(2 * x, RULE, None)
    assert step.operands(None)[1][0, MOMENTS["numel"]] == x.numel()


def test_nothing_is_counted_while_an_optimizer_tries_nor_the_short_way_gone_where_more_is_asked():
    x, gate = torch.randn(20, 64), Gate(paused=True)
    again, _, step = way(x, gate)
    assert again(x, RULE, None)
    assert not step.packer
    gate.paused, gate.asked = False, True
    assert not again(x, RULE, None)
    gate.asked = False
    assert again(x, RULE, None)


def test_no_step_is_open():
    x = torch.randn(20, 64)
    again, watched, step = way(x)
    watched.open = False  # a late thread may have left a device's share of it
    assert not again(x, RULE, None)
    assert not step.packer
    watched.open = True
    watched.held.clear()
    assert not again(x, RULE, None)


def test_time_is_counted_also_of_what_is_left_to_the_whole_way():
    x = torch.randn(20, 64)
    again, watched, _ = way(x)
    assert not again(OTHERS["not finite"](x), RULE, None)
    assert watched.seconds > 0
    watched.seconds, watched.on_gpu = 0.0, True
    assert again(x, RULE, None)
    assert watched.seconds == 0


OTHERS = {
    "another shape": lambda x: x[:19].contiguous(),
    "another type": lambda x: x.bfloat16(),
    "another class": torch.nn.Parameter,
    "rows apart": lambda x: torch.cat((x, x), 1)[:, :64],
    "turned": lambda x: x.t().contiguous().t(),
    "sparse": lambda x: x.to_sparse(),
    "elsewhere": lambda x: x.to("meta"),
    "negated": torch._neg_view,
    "not finite": lambda x: x.index_fill(0, torch.tensor([3]), torch.inf),
}


@pytest.mark.parametrize("lies", OTHERS)
def test_what_lies_otherwise_goes_the_whole_way(lies):
    x = torch.randn(20, 64)
    again, _, step = way(x)
    assert not again(OTHERS[lies](x), RULE, None)
    assert not step.packer
    assert again(x, RULE, None)


def test_another_rule_or_a_given_scale_goes_the_whole_way():
    x = torch.randn(20, 64)
    again, _, _ = way(x)
    assert not again(x, CURRENT.uses("grad_output")[0], None)
    assert not again(x, RULE, Given(None, torch.tensor(2.0)))


def test_freed_memory_is_not_read():
    """FSDP takes weights away between their uses."""
    view = torch.randn(65, 32)[1:]
    again, _, _ = way(view)
    x = view.clone()
    assert again(view, RULE, None)
    assert again(x, RULE, None)
    for freed in (view, x):
        freed.untyped_storage().resize_(0)
        assert not again(freed, RULE, None)


def test_the_walk_does_not_count_again_what_it_has_to_copy():
    assert host.wait()
    assert host.as_before(torch.randn(32, 64).t(), RULE, (1, 1)) is None
    assert host.as_before(torch.randn(64, 32, dtype=torch.float16), RULE, (1, 1)) is None
