"""What kernels count without making codes is what they count while they make them."""

import weakref

import pytest
import torch
from tests.compute.kernels.hard import hard

from narrowgauge.compute.kernels import BACKENDS, Given
from narrowgauge.compute.quant import (
    CURRENT,
    CURRENT_POW2,
    ROWWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    PerRow,
    PerTensor,
    quantize,
)
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.observe.stats import Collector

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused import quantize as quantize_module
from narrowgauge.compute.kernels.fused.watched.looks import Looks
from narrowgauge.observe.stats.device import count, ready

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = {
    "tensor": Operand(E4M3FN, PerTensor(), CURRENT, margin=1),
    "tiles": Operand(E4M3FN, BLOCK_1x128, CURRENT_POW2),
    "squares": Operand(E5M2, BLOCK_128x128, CURRENT_POW2),
    "rows": Operand(E4M3FN, PerRow(), ROWWISE),
}


def test_where_they_run(monkeypatch):
    assert not ready(torch.device("cpu"))
    capability = {"found": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability["found"])
    assert not ready.__wrapped__(torch.device("cuda", 1))
    capability["found"] = (9, 0)
    assert ready.__wrapped__(torch.device("cuda", 1))


def packed(x, rule, fill):
    looks = Looks(DEVICE)
    fill(looks.open("m:input", x, rule, 1))
    return looks.pack()[1]


def cast(x, rule, look, given=None):
    """As a layer would quantize it that needs its codes."""
    shared = rule.granularity == PerTensor()
    q, _, _ = BACKENDS["fused"].quantize_both(x, rule, None, shared=shared, given=given, look=look)
    return q


@pytest.mark.parametrize("name", ["normal", "spread", "zeros", "not finite"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_same_counts_as_with_codes(rule, name):
    x = hard(name, 35, 131).bfloat16()
    made = []
    want = packed(x, rule, lambda look: made.append(cast(x, rule, look)))
    assert made[0].codes.shape == x.shape
    assert torch.equal(packed(x, rule, lambda look: count(x, rule, look)), want) or name == "not finite"
    if name == "not finite":
        torch.testing.assert_close(packed(x, rule, lambda look: count(x, rule, look)), want, equal_nan=True)


def test_a_given_scale_is_used_and_its_history_left_alone():
    x, rule = hard("normal", 35, 131), RULES["tensor"]
    scale, slot = torch.tensor(0.002, device=DEVICE), torch.full((1,), -1.0, device=DEVICE)
    given = Given(scale, scale.reciprocal(), slot)
    want = packed(x, rule, lambda look: cast(x, rule, look, Given(scale, scale.reciprocal())))
    assert torch.equal(packed(x, rule, lambda look: count(x, rule, look, given)), want)
    assert not torch.equal(packed(x, rule, lambda look: count(x, rule, look)), want)  # its own scale is another
    assert slot.item() == -1


@pytest.mark.parametrize("scale", [0.002, 0.0123, float("inf"), 0.0, float("nan")])
def test_a_scale_that_is_not_stored_is_one_over_its_inverse(scale):
    x, rule = hard("normal", 35, 131), RULES["tensor"]
    inverse = torch.tensor(1 / scale if scale else float("inf"), device=DEVICE)
    want = packed(x, rule, lambda look: count(x, rule, look, Given(inverse.reciprocal(), inverse)))
    found = packed(x, rule, lambda look: count(x, rule, look, Given(None, inverse)))
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("given", [None, Given(None, torch.tensor(500.0, device=DEVICE))], ids=["own", "given"])
def test_a_look_is_counted_into_again_and_knows_nothing_of_the_step_before(given):
    looks, rule = Looks(DEVICE), RULES["tensor"]
    for step in range(3):
        x = 10.0**-step * hard("normal", 35, 131)  # ever smaller
        look = looks.open("m:input", x, rule, 1)
        count(x, rule, look, given)
        assert look.scratch.tolist() == [0, 0]
        look.scratch.fill_(7)  # as two streams that met in it would leave it
        torch.testing.assert_close(looks.pack()[1], packed(x, rule, lambda look: count(x, rule, look, given)))  # noqa: B023
        looks.clear()


@pytest.mark.parametrize(
    ("rule", "given"),
    [*((rule, False) for rule in RULES.values()), (RULES["tensor"], True)],
    ids=[*RULES, "given"],
)
def test_the_launches_that_filled_a_look_fill_it_again_from_what_lies_as_that_did(rule, given, monkeypatch):
    inverse = Given(None, torch.tensor(500.0, device=DEVICE)) if given else None
    looks, long = Looks(DEVICE), quantize_module._again
    again = []
    monkeypatch.setattr(quantize_module, "_again", lambda *args: again.append(args) or long(*args))
    for turn in range(4):
        x = 10.0**-turn * hard("normal", 150, 132)
        if given:
            inverse.inv_scale.mul_(1 + turn)  # written over, as TransformerEngine does
        count(x, rule, looks.open("m:input", x, rule, turn, False), inverse)
        fresh = Looks(DEVICE)
        count(x, rule, fresh.open("m:input", x, rule, turn, False), inverse)
        torch.testing.assert_close(looks.pack()[1], fresh.pack()[1], rtol=0, atol=0)
        looks.clear()
    assert len(again) == 1  # in the second turn; the others are made by it


def test_of_scales_that_are_others_in_each_step_none_is_kept():
    looks, rule, x = Looks(DEVICE), RULES["tensor"], hard("normal", 64, 132)
    for _ in range(3):
        given = Given(None, torch.tensor(500.0, device=DEVICE))
        look = looks.open("m:input", x, rule, 1, False)
        count(x, rule, look, given)
        assert look.again is None
        looks.clear()
    gone = weakref.ref(given)
    del given
    assert gone() is None


def other_strides(x):
    return x.t().contiguous().t()


def other_address(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)


@pytest.mark.parametrize("other", [other_strides, other_address], ids=["strides", "address"])
def test_what_lies_otherwise_is_looked_at_anew(other):
    looks, rule, x = Looks(DEVICE), RULES["tensor"], hard("normal", 64, 132)
    for each in (x, x, other(x), other(x), x):
        count(each, rule, looks.open("m:input", each, rule, 1, False))
        want = packed(each, rule, lambda look: count(each, rule, look))  # noqa: B023
        torch.testing.assert_close(looks.pack()[1], want, rtol=0, atol=0)
        looks.clear()


def test_another_scale_or_rule_or_shape_is_looked_at_anew():
    looks, x = Looks(DEVICE), hard("normal", 64, 132)
    one, other = (Given(None, torch.tensor(number, device=DEVICE)) for number in (500.0, 3.0))
    wider = Operand(E5M2, PerTensor(), CURRENT)
    for y, rule, given in (
        (x, RULES["tensor"], one), (x, RULES["tensor"], one), (x, RULES["tensor"], other),
        (x, RULES["tensor"], None), (x, RULES["tensor"], None), (x, wider, None), (x[:32], wider, None),
        (x.bfloat16(), wider, None), (x.bfloat16(), RULES["tiles"], None),
    ):  # fmt: skip
        count(y, rule, looks.open("m:input", y, rule, 1), given)
        want = packed(y, rule, lambda look: count(y, rule, look, given))  # noqa: B023
        torch.testing.assert_close(looks.pack()[1], want, rtol=0, atol=0)
        looks.clear()


def test_a_matrix_that_lies_the_other_way_is_not_copied_for_its_amax(monkeypatch):
    x, rule = hard("normal", 131, 35).t(), RULES["tensor"]
    want = packed(x.contiguous(), rule, lambda look: count(x.contiguous(), rule, look))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: pytest.fail("copied"))
    found = packed(x, rule, lambda look: count(x, rule, look))
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)  # summed in another order


def test_a_look_that_nobody_could_fill_is_left_out():
    looks, rule = Looks(DEVICE), RULES["tensor"]
    for step in range(2):
        for site, factor in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
            x = factor * (1 + step) * hard("normal", 64, 32)
            look = looks.open(site, x, rule, step)
            if step and site == "b":
                look.failed = True
            else:
                count(x, rule, look)
        sites, found = looks.pack()
        assert sites == (["a", "c"] if step else ["a", "b", "c"])
        looks.clear()
    want = packed(x, rule, lambda look: count(x, rule, look))
    torch.testing.assert_close(found[1], want[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_collector_judges_on_a_gpu_what_it_would_be_shown(rule):
    class Book:
        def __init__(self):
            self.rows = {}

        def add_tensors(self, step, sites, columns):
            for at, site in enumerate(sites):
                self.rows[step, site] = {name: column[at] for name, column in columns.items()}

        def add_event(self, step, kind, message, site=None, **data):
            raise AssertionError(message)

    book, w = Book(), torch.randn(256, 384, device=DEVICE)
    inputs = torch.randn(3, 640, 384, device=DEVICE, dtype=torch.bfloat16)
    for step, shown in enumerate((True, False)):
        collector = Collector(book)
        collector.begin_step(step)
        for x in inputs:
            for role, t in (("input", x), ("weight", w)):
                if shown:
                    q = quantize(t, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin)
                    collector.operand("m", role, t, q)
                else:
                    assert collector.judge("m", role, t, rule)
        collector.flush()
    for role in ("input", "weight"):
        want, found = (book.rows[step, f"m:{role}"] for step in range(2))
        for name in ("numel", "amax", "amin", "underflow_pct", "saturation_pct"):
            assert found[name] == pytest.approx(want[name], rel=1e-6), name
        assert found["mean"] == pytest.approx(want["mean"], abs=1e-6 * want["std"])
        for name in ("std", "mse", "sqnr_db", "cosine", "gain", "scale_min", "scale_max"):
            assert found[name] == pytest.approx(want[name], rel=1e-4, abs=1e-9), name
    assert book.rows[1, "m:weight"]["numel"] == w.numel()
