"""One FP8 linear layer against float64: values, gradients, dtypes, what is saved, what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.compute.nn.layers import Counting, Seen, adopt, calc_diff, sqnr_db
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import narrowgauge as ng
from narrowgauge.compute.nn.gathered import gathered_linear
from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.compute.quant import quantize
from narrowgauge.compute.recipes import BLOCKWISE, CATALOG, CURRENT, DELAYED, MXFP8, ROWWISE, fake
from narrowgauge.compute.recipes.switched import switched
from narrowgauge.errors import ConversionError

# dB of out, dX, dW for N(0,1), 512x1024x2048.
HEALTHY = {
    "current": (28.5, 24.6, 24.6),
    "delayed": (28.5, 24.6, 24.6),
    "static": (28.5, 24.6, 24.6),
    "rowwise": (28.5, 28.5, 28.5),
    "blockwise": (28.5, 28.5, 28.5),
    "mxfp8": (28.5, 28.5, 28.5),
    "mxfp8-ocp": (27.6, 27.6, 27.6),
}


@pytest.fixture(scope="module")
def exact():
    generator = torch.Generator().manual_seed(0)
    m, k, n = 512, 1024, 2048
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k), (m, n)))
    xd, wd, dyd = x.double(), w.double(), dy.double()
    return x, w, dy, (xd @ wd.T, dyd @ wd, dyd.T @ xd, dyd.sum(0))


def run(layer, x, dy):
    """Forward and backward with that upstream gradient: y, dx."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y, x.grad


def small(recipe=CURRENT, k=64, n=48, bias=True, **kwargs):
    torch.manual_seed(1)
    return adopt(nn.Linear(k, n, bias=bias), recipe, **kwargs)


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_values_and_gradients_are_as_good_as_the_formats_allow(recipe, exact):
    x, w, dy, (y_exact, dx_exact, dw_exact, db_exact) = exact
    layer = nn.Linear(w.shape[1], w.shape[0])
    layer.weight.data, layer.bias.data = w.clone(), torch.zeros(w.shape[0])
    adopt(layer, recipe)
    y, dx = run(layer, x, dy)
    found = (sqnr_db(y_exact, y), sqnr_db(dx_exact, dx), sqnr_db(dw_exact, layer.weight.grad))
    assert found == pytest.approx(HEALTHY[recipe.name], abs=1.0)
    limit = [2.5e-3 if operand.fmt.name == "E5M2" else 1e-3 for operand in recipe.uses("grad_output")]
    assert calc_diff(y_exact, y) < 1e-3
    assert calc_diff(dx_exact, dx) < limit[0]
    assert calc_diff(dw_exact, layer.weight.grad) < limit[1]
    assert sqnr_db(db_exact, layer.bias.grad) > 100  # never quantized


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_the_upstream_gradient_is_used(recipe):
    layer, x = small(recipe), torch.randn(32, 64)
    first = run(layer, x, torch.randn(32, 48))[1]
    second = run(layer, x, torch.randn(32, 48))[1]
    assert calc_diff(first, second) > 0.5


def test_wgrad_multiplies_copies_made_from_high_precision():
    layer, x, dy = small(ROWWISE), torch.randn(32, 64), torch.randn(32, 48)
    run(layer, x, dy)
    rule_a, rule_b = ROWWISE.wgrad.a, ROWWISE.wgrad.b
    dyT = quantize(dy.T.contiguous(), rule_a.fmt, rule_a.granularity, scaling=rule_a.scaling)
    xT = quantize(x.T.contiguous(), rule_b.fmt, rule_b.granularity, scaling=rule_b.scaling)
    want = dyT.dequantize(torch.float64) @ xT.dequantize(torch.float64).T
    torch.testing.assert_close(layer.weight.grad.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKWISE], ids=lambda r: r.name)
def test_fake_is_the_exact_product_up_to_bf16(recipe):
    layer, faked = small(recipe), small(fake(recipe))
    x, dy = torch.randn(32, 64), torch.randn(32, 48, dtype=torch.bfloat16)
    results = []
    for module in (layer, faked):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.backward(dy)
        results.append((y, module.weight.grad))
    for native, high in zip(*results, strict=True):
        assert calc_diff(native, high) < 2e-5
        assert not torch.equal(native, high)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 5, 64), (0, 64), (4, 0, 64)])
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, ROWWISE, BLOCKWISE, MXFP8], ids=lambda r: r.name)
def test_any_leading_dimensions_and_empty_batches(shape, recipe):
    layer = small(recipe)
    x = torch.randn(shape)
    y, dx = run(layer, x, torch.randn(*shape[:-1], 48))
    assert y.shape == F.linear(x, layer.weight, layer.bias).shape
    assert dx.shape == x.shape
    assert layer.weight.grad.shape == layer.weight.shape
    if x.numel() == 0:
        assert not layer.weight.grad.any()
        assert not layer.bias.grad.any()
    else:
        assert calc_diff(F.linear(x, layer.weight, layer.bias), y) < 3e-3


def test_strided_inputs_and_gradients():
    layer, x = small(), torch.randn(64, 32)
    y_view, dx_view = run(layer, x.T, torch.ones(1, 1).expand(32, 48))
    layer.weight.grad = None
    y, dx = run(layer, x.T.contiguous(), torch.ones(32, 48))
    assert torch.equal(y, y_view)
    assert torch.equal(dx, dx_view)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_dtypes_follow_autocast_as_those_of_linear_do(weight, x, autocast):
    plain = nn.Linear(64, 48).to(weight)
    layer = adopt(nn.Linear(64, 48).to(weight))
    x_plain, x_layer = (torch.randn(8, 64, dtype=x, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", autocast):
        y_plain, y = plain(x_plain), layer(x_layer)
    (y_plain.sum() + y.sum()).backward()
    assert y.dtype == y_plain.dtype == autocast
    assert x_layer.grad.dtype == x_plain.grad.dtype
    assert layer.weight.grad.dtype == plain.weight.grad.dtype
    assert layer.bias.grad.dtype == plain.bias.grad.dtype


def test_autocast_leaves_float64_alone():
    plain, layer = nn.Linear(64, 48).double(), adopt(nn.Linear(64, 48).double())
    x = torch.randn(8, 64, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == plain(x).dtype == torch.float64


def test_autocast_refuses_a_float64_bias_as_linear_does():
    plain = nn.Linear(64, 48)
    plain.bias.data = plain.bias.data.double()
    layer, x = adopt(copy.deepcopy(plain)), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        for module in (plain, layer):
            with pytest.raises(RuntimeError, match="must have the same dtype"):
                module(x)


@pytest.mark.parametrize("recipe", [CURRENT, ROWWISE, BLOCKWISE], ids=lambda r: r.name)
def test_autocast_does_not_reach_inside(recipe):
    layer, x, dy = small(recipe), torch.randn(8, 64), torch.randn(8, 48)
    y, dx = run(layer, x, dy)
    dw, layer.weight.grad = layer.weight.grad, None
    with torch.autocast("cpu", torch.bfloat16):
        y_low = layer(x)
        assert torch.equal(y_low, y.bfloat16())  # rounded once, at the end
    x_full = x.clone().requires_grad_()
    y_full = layer(x_full)
    with torch.autocast("cpu", torch.bfloat16):
        y_full.backward(dy)
    assert torch.equal(x_full.grad, dx)
    assert torch.equal(layer.weight.grad, dw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_without_autocast_everything_keeps_its_dtype(dtype):
    layer = adopt(nn.Linear(64, 48).to(dtype))
    y, dx = run(layer, torch.randn(8, 64, dtype=dtype), torch.randn(8, 48, dtype=dtype))
    assert {y.dtype, dx.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype} == {dtype}


def test_a_float32_weight_is_quantized_from_float32_under_autocast():
    layer, seen = small(), Seen()
    set_observer(layer, seen)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(8, 64))
    [(_, q, _)] = seen.operands["layer", "weight"]
    want = quantize(layer.weight, q.fmt)
    assert torch.equal(q.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(q.scale, want.scale)


def test_what_linear_refuses_is_refused_in_the_same_words():
    for x in (torch.randn(8, 64).bfloat16(), torch.randn(8, 65), torch.ones(8, 64, dtype=torch.long)):
        layer = small()
        with pytest.raises(RuntimeError) as theirs:
            F.linear(x, layer.weight, layer.bias)
        with pytest.raises(RuntimeError) as ours:
            layer(x)
        assert str(ours.value) == str(theirs.value)


def saved_by(work):
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()
    return result, saved


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_only_codes_and_scales_are_saved(recipe):
    layer = small(recipe, k=256, n=128)
    x = torch.randn(512, 256, requires_grad=True)
    _, saved = saved_by(lambda: layer(x))
    big = [t for t in saved if t.numel() >= 128 * 256]
    assert {t.dtype.itemsize for t in big} == {1}
    assert sum(t.numel() for t in big) == 512 * 256 + 128 * 256
    assert sum(t.numel() * t.dtype.itemsize for t in saved) < 1.2 * (512 * 256 + 128 * 256)


def test_what_no_gradient_needs_is_neither_saved_nor_computed():
    backend = Counting()
    layer, x = small(backend=backend, bias=False), torch.randn(8, 64)
    y, saved = saved_by(lambda: layer(x))
    y.sum().backward()
    assert [t.shape for t in saved if t.dim() == 2] == [(64, 8)]  # x for wgrad, no w
    assert backend.shapes == [(8, 64, 48), (48, 8, 64)]  # no dgrad

    backend.shapes.clear()
    layer.weight.requires_grad_(False)
    y, saved = saved_by(lambda: layer(x.requires_grad_()))
    y.sum().backward()
    assert [t.shape for t in saved if t.dim() == 2] == [(64, 48)]  # w for dgrad, no x
    assert backend.shapes == [(8, 64, 48), (8, 48, 64)]  # no wgrad

    with torch.no_grad():
        _, saved = saved_by(lambda: layer(x))
    assert saved == []


def test_a_frozen_bias_and_a_bias_alone():
    layer, dy = small(), torch.randn(8, 48)
    layer.bias.requires_grad_(False)
    run(layer, torch.randn(8, 64), dy)
    assert layer.bias.grad is None
    layer = small(backend=(backend := Counting()))
    layer.weight.requires_grad_(False)
    layer(torch.randn(8, 64)).backward(dy)
    torch.testing.assert_close(layer.bias.grad, dy.sum(0))
    assert len(backend.shapes) == 1


def test_gradients_accumulate_over_microbatches():
    layer, batches = small(), [(torch.randn(8, 64), torch.randn(8, 48)) for _ in range(3)]
    total = torch.zeros_like(layer.weight)
    for x, dy in batches:
        run(layer, x, dy)
        total += layer.weight.grad
        layer.weight.grad = None
    for x, dy in batches:
        run(layer, x, dy)
    assert torch.equal(layer.weight.grad, total)


def test_shared_weights_and_a_layer_called_twice():
    one, two = small(n=64, bias=False), small(n=64, bias=False)
    two.weight = one.weight
    x, dy = torch.randn(8, 64), torch.randn(8, 64)
    two(one(x)).backward(dy)
    through_two_modules = one.weight.grad.clone()
    one.weight.grad = None
    one(one(x)).backward(dy)
    assert torch.equal(one.weight.grad, through_two_modules)
    w = one.weight.detach().clone().requires_grad_()
    F.linear(F.linear(x, w), w).backward(dy)
    assert calc_diff(w.grad, one.weight.grad) < 6e-3


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_number_anywhere_stays_visible(recipe, bad):
    x, dy = torch.randn(32, 64), torch.randn(32, 48)
    sick_x, sick_dy = x.clone(), dy.clone()
    sick_x[3, 5], sick_dy[4, 6] = bad, bad

    layer = small(recipe)
    y, _ = run(layer, sick_x, dy)
    assert not y[3].isfinite().any()
    assert not layer.weight.grad[:, 5].isfinite().any()

    layer = small(recipe)
    _, dx = run(layer, x, sick_dy)
    assert not dx[4].isfinite().any()
    assert not layer.weight.grad[6].isfinite().any()
    assert not layer.bias.grad[6].isfinite()

    layer = small(recipe)
    layer.weight.data[7, 9] = bad
    y, dx = run(layer, x, dy)
    assert not y[:, 7].isfinite().any()
    assert not dx[:, 9].isfinite().any()


def test_differentiating_twice_is_an_error_and_not_a_wrong_number():
    layer, x = small(), torch.randn(8, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice a converted layer: .*\[convert\]"):
        dx.sum().backward()


def test_a_constant_upstream_gradient_does_not_hide_that_it_depends_on_the_weight():
    layer, x = small(), torch.randn(8, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert dx.requires_grad
    penalty = (dx.norm() - 1).square() + layer(x).sum()
    with pytest.raises(RuntimeError, match=r"differentiate twice a converted layer: .*\[convert\]"):
        penalty.backward()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # by which torch makes derivatives in forward mode
@pytest.mark.parametrize("high", [(), ("wgrad",)], ids=["FP8", "switched"])
def test_a_derivative_in_forward_mode_is_an_error(high):
    layer = adopt(nn.Linear(64, 48), switched(CURRENT, high) if high else CURRENT)
    x = torch.randn(8, 64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ConversionError, match=r"forward mode .*\[convert\]"):
            layer(dual)
        layer(x).sum().backward()


def test_vmap_is_an_error():
    layer = small()
    with pytest.raises(ConversionError, match=r"inside a transform of torch\.func"):
        torch.func.vmap(layer)(torch.randn(2, 8, 64))


WAYS = {
    "plain": lambda layer: layer,
    "compiled": lambda layer: torch.compile(layer, backend="aot_eager"),
    "gathered": lambda layer: lambda x: gathered_linear(x, layer.weight, layer.bias, layer._fp8),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("high", [(), [{"gemms": ["wgrad"]}]], ids=["", "switched"])
def test_a_result_may_be_changed_in_place(way, high):
    torch.manual_seed(0)
    layer = ng.convert(nn.Sequential(nn.Linear(32, 48)), "current", high=high)[0][0]
    multiply = WAYS[way](layer)
    for shape in ((16, 32), (3, 32), (2, 5, 32)):
        x, dy, found = torch.randn(shape), torch.randn(*shape[:-1], 48), []
        for activation in torch.relu, torch.relu_:  # nn.ReLU(inplace=True)
            layer.zero_grad()
            y = activation(multiply(x))
            y.backward(dy)
            found.append((y, layer.weight.grad, layer.bias.grad))
        for plain, changed in zip(*found, strict=True):
            assert torch.equal(plain, changed)
