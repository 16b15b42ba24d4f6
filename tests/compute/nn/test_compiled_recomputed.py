"""What inductor makes once more of a layer's input, for wgrad: the bits that the forward pass saw, or nearly."""

import pytest
import torch
from torch import nn
from torch._inductor import config

import narrowgauge as ng
from narrowgauge.compute.nn import gemms
from narrowgauge.compute.nn.tracing.in_graph import remade
from narrowgauge.compute.quant import quantize

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


class Gate(nn.Module):
    """SwiGLU before a layer, then RMSNorm before another."""

    def __init__(self):
        super().__init__()
        self.down, self.norm, self.out = nn.Linear(128, 64, bias=False), nn.RMSNorm(64), nn.Linear(64, 32, bias=False)

    def forward(self, a, b):
        h = self.down(nn.functional.silu(a) * b)
        return h + self.norm.weight.sum(), self.out(self.norm(h))


class Residual(nn.Module):
    """A sum that is kept for later, rounded, and that goes into an activation as it is, not rounded."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(128, 64, bias=False)

    def forward(self, a, b):
        h = a * 1.7 + b * a.sigmoid()
        return h, self.out(h * h.sigmoid())


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def seen(monkeypatch):
    """Of every layer's name: x as the forward pass saw it, and codes of it, dy and dw as wgrad did."""
    found = {}
    fprop, wgrad = gemms.fprop, gemms.wgrad

    def forward(call, x, w, bias, high):
        found[call.state.name] = [high[0].clone()]
        return fprop(call, x, w, bias, high)

    def backward(call, dy_T, x_T, dtype, dy_MN, samples):
        dw = wgrad(call, dy_T, x_T, dtype, dy_MN, samples)
        found[call.state.name] += [x_T, dy_MN.clone(), dw.clone()]
        return dw

    monkeypatch.setattr(gemms, "fprop", forward)
    monkeypatch.setattr(gemms, "wgrad", backward)
    return found


def inputs(dtype, wild):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 128, generator=g).to(dtype) for _ in range(2))
    if wild:
        tiny = torch.finfo(dtype).smallest_normal
        a[:8], b[:8] = 30.0, torch.randint(-64, 65, (8, 128), generator=g).to(dtype) / 32  # on ties of codes
        a[8:16], b[8:16] = 1.0, tiny * torch.linspace(-1.2, 1.2, 128)  # denormal
        b[16:18] = -0.0
        b[18] = torch.finfo(dtype).max
        b[19, 5], b[100, 7], b[130, 9] = float("inf"), float("-inf"), float("nan")
    return a.requires_grad_(), b.requires_grad_()


def backward_of(model, recipe, dtype, wild):
    torch.manual_seed(0)
    model, _ = ng.convert(model.to(dtype), recipe=recipe, backend="reference")
    h, y = torch.compile(model, fullgraph=True)(*inputs(dtype, wild))
    (h.float().sum() + y.float().square().sum()).backward()
    return model


def same(a, b):
    """The same numbers, zeros' signs too, and NaN in the same places."""
    a, b = a.float(), b.float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(7.0).view(torch.int32), b.nan_to_num(7.0).view(torch.int32)
    )


def codes_of(x, layer):
    rule = layer._fp8.recipe.uses("input")[1]
    return quantize(x.T.contiguous(), rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin)


def noise(codes_xT, x):
    return float((codes_xT.dequantize().T.double() - x.double()).square().sum())


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(recipe, torch.bfloat16) for recipe in ("current", "rowwise", "blockwise")]
    + [("rowwise", torch.float16), ("blockwise", torch.float32)],
)
def test_gradients_are_those_of_the_x_that_the_forward_pass_saw(recipe, dtype, wild, seen):
    with config.patch(emulate_precision_casts=True):  # else it depends on what is merged with what
        model = backward_of(Gate(), recipe, dtype, wild)
    for name in ("down", "out"):
        layer = model.get_submodule(name)
        x, codes_xT, dy, dw = seen[name]
        want = codes_of(x, layer)
        assert same(codes_xT.codes, want.codes)
        assert same(codes_xT.scale, want.scale)
        layer.weight.grad = None
        layer(x).backward(dy)  # not compiled
        assert same(dw, layer.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("module", "recipe"), [(Gate, "current"), (Residual, "rowwise"), (Residual, "blockwise")])
def test_what_is_not_rounded_between_operations_moves_x_by_its_last_digits_alone(module, recipe, dtype, seen):
    """As docs/fast_path.md has it: the backward pass reads, rounded, what the forward pass had in a register."""
    model = backward_of(module(), recipe, dtype, False)
    for name, (x, codes_xT, *_) in seen.items():
        want = codes_of(x, model.get_submodule(name))
        assert noise(codes_xT, x) < 1.02 * noise(want, x)  # 0.1 dB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_x_remade_is_x(dtype):
    if dtype == torch.float32:
        bits = torch.cat(
            [sign | (torch.arange(0, 1 << 31, 39_989).int() + low) for sign in (0, -(1 << 31)) for low in (0, 1)]
        )
    else:
        bits = torch.arange(-(1 << 15), 1 << 15).short()
    x = bits.view(dtype).view(-1, 4)
    y = torch.compile(remade, fullgraph=True)(x)
    assert same(y, x)
