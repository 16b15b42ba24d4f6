"""What programs on a GPU sum of their operands by themselves, of tensors on a CPU: against `measure` of the codes."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu_operand_sums import Sums, coded, newest, normed, own, row, worst

import narrowgauge as ng
from narrowgauge.compute.quant import CURRENT_POW2, Block
from narrowgauge.formats import E4M3FN, E5M2


@dataclass
class Quantizer:
    """As TransformerEngine's: a copy shares its scale and the place of its amax; blocks' scales are padded."""

    scale: torch.Tensor
    amax: torch.Tensor
    granularity: object = None
    rowwise: bool = False

    def copy(self):
        return replace(self)

    def set_usage(self, *, rowwise, columnwise):
        self.rowwise = rowwise and not columnwise

    def __call__(self, x):
        assert self.rowwise
        self.amax.copy_(x.abs().max())
        if self.granularity is None:
            q = ng.quantize(x, E4M3FN, scale=float(1 / self.scale))
            made = SimpleNamespace(_scale_inv=q.scale.reshape(1))
        else:
            q = ng.quantize(x, E4M3FN, granularity=self.granularity, scaling=CURRENT_POW2)
            square = self.granularity.rows > 1
            inverse = q.scale if square else q.scale.t()
            padded = torch.full((len(inverse), inverse.shape[1] + 3), 1e30)
            padded[:, : inverse.shape[1]] = inverse
            made = SimpleNamespace(_rowwise_scale_inv=padded, _is_2D_scaled=square)
        made.dequantize = lambda dtype: q.dequantize().to(dtype)
        return made


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(("role", "fmt"), [("input", E4M3FN), ("grad_output", E5M2)])
def test_in_high_precision_an_operand_is_judged_by_a_scale_of_its_own(role, fmt):
    x, sums = drawn(4, 32, 64), Sums()
    sums.add(x, role)
    found = row(sums.parts)
    want = ng.measure(x.reshape(-1, 64), ng.quantize(x.reshape(-1, 64), fmt))
    assert worst(want, found) < 1e-6
    assert "amax_ratio" not in found


def test_a_delayed_scale_is_judged_by_a_copy_and_the_amax_that_it_was_made_from():
    x, held, sums = drawn(64, 64), Quantizer(torch.tensor(448 / 2.0), torch.zeros(1)), Sums()
    sums.add(x, "input", held, 2.0)
    sums.add(x / 4, "input", held, 2.0)
    found = row(sums.parts)
    assert held.amax.item() == 0.0  # the layer's own history has nothing of it
    assert found["numel"] == 2 * x.numel()
    assert found["saturation_pct"] == 50 * (x.abs() > 2).double().mean().item() > 0
    assert found["amax_ratio"] == x.abs().max().item() / 2
    assert found["scale_min"] == found["scale_max"] == pytest.approx(2 / 448, rel=1e-7)
    d = torch.cat([ng.quantize(part, E4M3FN, scale=2 / 448).dequantize().double() for part in (x, x / 4)])
    both = torch.cat([x, x / 4]).double()
    sqnr = 10 * math.log10(both.square().sum() / (both - d).square().sum())
    assert found["sqnr_db"] == pytest.approx(sqnr, rel=1e-9)


@pytest.mark.parametrize("granularity", [Block(1, 128), Block(128, 128)])
def test_scales_of_blocks_are_those_without_the_padding(granularity):
    x = drawn(256, 384) * torch.logspace(-2, 2, 384).to(torch.bfloat16)
    held = Quantizer(torch.tensor(1.0), torch.zeros(1), granularity)
    sums = Sums()
    sums.add(x, "input", held)
    q = ng.quantize(x, E4M3FN, granularity=granularity, scaling=CURRENT_POW2)
    assert worst(ng.measure(x, q), row(sums.parts)) < 1e-6
    assert row(sums.parts)["scale_min"] < row(sums.parts)["scale_max"] < 1e3
    assert coded(x, held)[1].numel() == q.scale.numel()


def test_a_layer_s_quantizer_and_the_newest_amax_of_its_history_are_its_own():
    history = torch.tensor([[9.0, 9.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [0.0, 1.5, 0.0, 2.5]])
    meta = {way: SimpleNamespace(amax_history=history) for way in ("scaling_fwd", "scaling_bwd")}
    layer = SimpleNamespace(
        fp8=True, fp8_meta=meta, quantizers={"scaling_fwd": list("xwyX"), "scaling_bwd": list("gdGD")}
    )
    assert own(layer, "input") == ("x", 5.0)  # the newest is 0: of a step that made no amax
    assert own(layer, "weight") == ("w", 1.5)
    assert own(layer, "input", 1) == ("X", 2.5)
    assert own(layer, "grad_output", 1) == ("G", 7.0)
    assert newest(torch.zeros(3)) == 0.0
    assert own(SimpleNamespace(fp8=False), "input") == (None, None)
    layer.fp8_meta = {"scaling_fwd": SimpleNamespace()}  # of a scale of now
    assert own(layer, "input") == ("x", None)


def test_what_a_layer_norms_is_normed_by_the_formula():
    x, weight, bias = drawn(32, 64), drawn(64, seed=1), drawn(64, seed=2)
    layer = SimpleNamespace(layer_norm_weight=weight, layer_norm_bias=bias, eps=1e-5)
    want = torch.nn.functional.layer_norm(x.double(), (64,), weight.double(), bias.double(), 1e-5).to(torch.bfloat16)
    assert torch.equal(normed(layer, x), want)


def test_a_row_that_is_off_or_missing_is_far():
    sums = Sums()
    sums.add(drawn(64, 64), "weight")
    want = row(sums.parts)
    assert worst(want, want) == 0
    assert worst(want | {"scale_max": want["scale_max"] * 1.01}, want) == pytest.approx(0.01)
    assert worst(want | {"mean": want["mean"] + 0.01}, want) == pytest.approx(0.01, rel=0.1)
    assert worst(want | {"underflow_pct": want["underflow_pct"] + 1}, want) == pytest.approx(0.01)
    assert worst(want | {"sqnr_db": math.nan}, want) == math.inf
