"""SwiGLU, its gradient and RMSNorm, quantized where they are computed.

Codes, scale and amax are those of the y that the same launch wrote, bit for bit. That y is torch's float32 result,
rounded once, up to one step of bfloat16: exp and rsqrt differ in the last place between machines, and a GPU fuses
products with sums. `slack` says what an absolute error of float32 may leave where numbers cancel or vanish.
"""

import math

import pytest
import torch
from tests.compute.kernels.hard import DEVICE, hard

from narrowgauge.compute.kernels.both import Given
from narrowgauge.compute.quant import CURRENT, PerTensor, quantize
from narrowgauge.compute.recipes import Operand
from narrowgauge.errors import ShapeError
from narrowgauge.formats import E4M3FN, E5M2

pytest.importorskip("triton")

from benchmarks.producers import norm, swiglu
from benchmarks.producers.pieces import Launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
E4M3, E5M2_RULE = (Operand(fmt, PerTensor(), CURRENT) for fmt in (E4M3FN, E5M2))
NAMES = ["normal", "spread", "subnormal", "huge", "zeros", "ties", "not finite"]
SHAPES = [(70, 134), (1, 2)]
LAUNCH = Launch(64, 64, 4, None)  # more tiles of small tensors
EPS = 1e-5


def given(scale, inv_scale=None, slot=None, scratch=None):
    def number(value):
        return torch.tensor(value, dtype=torch.float32, device=DEVICE)

    return Given(number(scale), number(1 / scale if inv_scale is None else inv_scale), slot, scratch)


def silu_product(gate_up):
    """y, and the slack: a GPU takes the sigmoid of what is below -87.3 for 0."""
    gate, up = gate_up.float().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up, 2e-36 * up.abs()


def silu_product_gradient(gate_up, dy):
    """d(gate_up), and the slack: 1 + gate (1 - s) cancels near -1.28."""
    gate, up = gate_up.float().chunk(2, -1)
    dy, s = dy.float(), torch.sigmoid(gate)
    d_gate, d_up = dy * up * s * (1 + gate * (1 - s)), dy * (gate * s)
    cancels = 1e-6 * (dy * up * s).abs() + 2e-36 * (dy * up).abs()
    return torch.cat((d_gate, d_up), -1), torch.cat((cancels, 2e-36 * dy.abs()), -1)


def order(x):
    """bfloat16 as integers that count its steps."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_rounded_once(found, want, slack):
    nearest = want.bfloat16()
    none = nearest.isnan()
    assert torch.equal(found.isnan(), none)
    apart = (order(found) - order(nearest)).abs()
    near = (found.double() - want.double()).abs() <= slack.double()
    assert ((apart <= 1) | near | none).all()
    assert ((apart == 0) | none).float().mean() > 0.98  # and nearly all of them are the same


def assert_bits(found, want):
    none = want.float().isnan()  # a NaN's sign says nothing
    assert found.is_contiguous()
    assert torch.equal(found.float().isnan(), none)
    assert torch.equal(found.view(torch.uint8)[~none], want.contiguous().view(torch.uint8)[~none])


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def assert_quantized(made, rule, using):
    """Everything that was made of y, by the reference quantizer."""
    want = quantize(made.high, rule.fmt, scale=using.scale, inv_scale=using.inv_scale)
    assert (made.scale.shape, made.amax.shape) == ((), ())
    assert same(made.amax, made.high.float().abs().max())
    assert same(made.scale, want.scale)
    assert_bits(made.plain, want.codes)
    assert_bits(made.turned, want.codes.T)


def inputs(name, M, F):
    x = hard(name, M, 3 * F).bfloat16()
    return x[:, : 2 * F].contiguous(), x[:, 2 * F :].contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_swiglu(name, shape):
    gate_up, _ = inputs(name, *shape)
    using = given(0.37)
    made = swiglu.swiglu_given(gate_up, E4M3, using, high=True, launch=LAUNCH)
    assert_rounded_once(made.high, *silu_product(gate_up))
    assert_quantized(made, E4M3, using)
    y, amax = swiglu.swiglu_amax(gate_up)
    assert_rounded_once(y, *silu_product(gate_up))
    assert same(amax, y.float().abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_swiglu(name, shape):
    gate_up, dy = inputs(name, *shape)
    using = given(2.0**-9)
    made = swiglu.swiglu_grad_given(gate_up, dy, E5M2_RULE, using, high=True, launch=LAUNCH)
    assert made.plain.shape == gate_up.shape
    assert_rounded_once(made.high, *silu_product_gradient(gate_up, dy))
    assert_quantized(made, E5M2_RULE, using)
    d_gate_up, amax = swiglu.swiglu_grad_amax(gate_up, dy)
    assert_rounded_once(d_gate_up, *silu_product_gradient(gate_up, dy))
    assert same(amax, d_gate_up.float().abs().max())


def test_the_gradient_is_the_gradient():
    torch.manual_seed(0)
    gate_up, dy = (torch.randn(70, n, device=DEVICE).bfloat16() for n in (200, 100))
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    y = torch.nn.functional.silu(gate) * up
    y.backward(dy.double())
    assert torch.allclose(swiglu.swiglu_amax(gate_up)[0].double(), y, rtol=2**-8, atol=1e-5)
    assert torch.allclose(swiglu.swiglu_grad_amax(gate_up, dy)[0].double(), leaf.grad, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("eps", [EPS, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_rms_norm(name, eps):
    for M, K in SHAPES:
        x, weight, using = hard(name, M, K).bfloat16(), 1 + hard("normal", 1, K)[0] / 4, given(0.011)
        rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
        want = x.float() * rstd[:, None] * weight
        made, found = norm.rms_norm_given(x, weight, eps, E4M3, using, high=True, launch=LAUNCH)
        assert torch.allclose(found, rstd, rtol=1e-6, atol=0, equal_nan=True)
        assert_rounded_once(made.high, want, 0 * want)
        assert_quantized(made, E4M3, using)
        y, amax, found = norm.rms_norm_amax(x, weight.bfloat16(), eps)
        assert torch.allclose(found, rstd, rtol=1e-6, atol=0, equal_nan=True)
        want = x.float() * rstd[:, None] * weight.bfloat16().float()
        assert_rounded_once(y, want, 0 * want)
        assert same(amax, y.float().abs().max())


def test_rms_norm_is_that_of_torch():
    layer = torch.nn.RMSNorm(200, eps=EPS, device=DEVICE)
    torch.nn.init.normal_(layer.weight)
    x = hard("normal", 70, 200).bfloat16()
    y, _, _ = norm.rms_norm_amax(x, layer.weight.detach(), EPS)
    assert torch.allclose(y.float(), layer(x.float()), rtol=2**-8, atol=0)


CALLS = {
    "swiglu": lambda *a, **k: swiglu.swiglu_given(inputs("normal", 100, 60)[0], *a, **k),
    "its gradient": lambda *a, **k: swiglu.swiglu_grad_given(*inputs("normal", 100, 60), *a, **k),
    "norm": lambda *a, **k: norm.rms_norm_given(
        hard("normal", 100, 60).bfloat16(), torch.ones(60, device=DEVICE), EPS, *a, **k
    )[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_only_what_is_asked_for(call):
    all_of_it = call(E4M3, given(0.25), high=True)
    for wanted in ((True, False, False), (False, True, False), (False, False, False)):
        found = call(E4M3, given(0.25), **dict(zip(("plain", "turned", "high"), wanted, strict=True)))
        assert [part is not None for part in (found.plain, found.turned, found.high)] == list(wanted)
        for part, whole in ((found.plain, all_of_it.plain), (found.turned, all_of_it.turned)):
            assert part is None or torch.equal(part.view(torch.uint8), whole.view(torch.uint8))
        assert (found.amax, found.scale) == (all_of_it.amax, 0.25)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_scale_slot_and_scratch_are_those_of_the_cast(call):
    scratch = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    slot = torch.full((1,), -1.0, device=DEVICE)
    for scale in (0.5, 0.0, -1.0, math.inf, math.nan):
        using = given(scale, 2.0, slot, scratch)
        made = call(E4M3, using, high=True)
        assert_quantized(made, E4M3, using)
        assert made.scale.isnan() == (scale != 0.5)
        assert slot == made.amax
        assert scratch.tolist() == [0, 0]  # ready for the next call


def test_the_slot_keeps_the_largest_finite_amax():
    slot, seen = torch.full((1,), -1.0, device=DEVICE), []
    for largest in (0.0, 2.0, 5.0, math.inf, math.nan, 3.0):
        gate_up = torch.zeros(40, 96, device=DEVICE).bfloat16()
        gate_up[30, 40], gate_up[30, 48 + 40] = 100, -largest / 100
        made = swiglu.swiglu_given(gate_up, E4M3, given(1.0, slot=slot), launch=LAUNCH)
        seen.append(round(slot.item(), 1))
        assert made.scale.isnan() == (not math.isfinite(largest))
    assert seen == [0, 2, 5, 5, 5, 5]


def test_views_and_nothing():
    gate_up, dy = inputs("normal", 50, 60)
    want = swiglu.swiglu_grad_given(gate_up, dy, E5M2_RULE, given(0.01))
    wide = torch.zeros(50, 200, device=DEVICE).bfloat16()
    for first in (0, 3):  # in words, and not
        wide[:, first : first + 120] = gate_up
        made = swiglu.swiglu_grad_given(wide[:, first : first + 120], dy.T.contiguous().T, E5M2_RULE, given(0.01))
        assert torch.equal(made.plain.view(torch.uint8), want.plain.view(torch.uint8))
    slot = torch.full((1,), -1.0, device=DEVICE)
    made = swiglu.swiglu_given(gate_up[:0], E4M3, given(2.0, slot=slot))
    assert (made.plain.shape, made.turned.shape, made.scale, made.amax, slot) == ((0, 60), (60, 0), 2, 0, -1)
    made, rstd = norm.rms_norm_given(dy[:0], torch.ones(60, device=DEVICE), 0.0, E4M3, given(2.0, slot=slot))
    assert (made.plain.shape, rstd.shape, made.scale, made.amax, slot) == ((0, 60), (0,), 2, 0, -1)


def test_what_does_not_fit_is_said():
    gate_up, dy = inputs("normal", 8, 6)
    with pytest.raises(ShapeError, match=r"gate_up is torch.bfloat16 \[8, 10\].*multiple of 4"):
        swiglu.swiglu_amax(gate_up[:, :10])
    with pytest.raises(ShapeError, match=r"x is torch.float32 \[8, 6\].*torch.bfloat16"):
        norm.rms_norm_amax(dy.float(), dy[0], EPS)
    with pytest.raises(ShapeError, match=r"dy is \[8, 12\] and gate_up \[8, 12\]; dy must be \[8, 6\]"):
        swiglu.swiglu_grad_amax(gate_up, gate_up)
    with pytest.raises(ShapeError, match=r"weight is \[4\] and x \[8, 6\]; weight must be \[6\]"):
        norm.rms_norm_amax(dy, dy[0, :4], EPS)
