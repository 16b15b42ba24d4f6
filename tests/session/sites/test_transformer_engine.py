"""TransformerEngine's layers, through stand-ins that hold what its layers hold and quantize as they do.

The real ones need a GPU: `benchmarks/gpu_check_transformer_engine.py` holds the same against them.
"""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.session.sites.recorded import check, recorded
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, BLOCK_1x32, BLOCK_1x128, BLOCK_128x128, PerTensor, QTensor
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.session.sites import kind_of, te_quantizers
from narrowgauge.session.sites.te_quantizers import rule_of
from narrowgauge.session.sites.tensor_parallel import Copies
from narrowgauge.session.sites.transformer_engine import TransformerEngine

MAX = {"kFloat8E4M3": (448.0, torch.float8_e4m3fn, E4M3FN), "kFloat8E5M2": (57344.0, torch.float8_e5m2, E5M2)}
DType = Enum("DType", [*MAX, "kFloat4E2M1"])


class Float8Quantizer:
    """A slot of a delayed scale and of the row of amaxes that is being filled."""

    def __init__(self, scale, amax, dtype):
        self.scale, self.amax, self.dtype = scale, amax, DType[dtype]
        self.made = []

    def __call__(self, x):
        top, dtype, fmt = MAX[self.dtype.name]
        x = x.detach().clone()
        self.amax.copy_(torch.maximum(self.amax, x.abs().max().float()))
        codes = (x.float() * self.scale).clamp(-top, top).to(dtype)
        self.made.append((x, QTensor(codes, self.scale.reciprocal().reshape(()), fmt, PerTensor()), self.amax.clone()))
        return codes.float() / self.scale


class Delayed:
    """The state of one direction: scales, and amaxes of the last steps, the newest in row 0."""

    def __init__(self, slots, dtype, scales):
        self.scale, self.amax_history, self.dtype = torch.tensor(scales), torch.zeros(4, slots), dtype

    def make_quantizers(self):
        row = self.amax_history[0]
        return [Float8Quantizer(self.scale[i], row[i].reshape((1,)), self.dtype) for i in range(len(self.scale))]

    def update(self):
        """The newest amax makes the next scale, in place; then the next row is open."""
        amax = self.amax_history[0]
        self.scale.copy_(torch.where(amax > 0, MAX[self.dtype][0] / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = 0


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, qx, qw, qdy):
        ctx.save_for_backward(x_hat := qx(x), w_hat := qw(w))
        ctx.qdy = qdy
        return x_hat @ w_hat.t()

    @staticmethod
    def backward(ctx, dy):
        x_hat, w_hat = ctx.saved_tensors
        dy_hat = ctx.qdy(dy)
        return dy_hat @ w_hat, dy_hat.t() @ x_hat, None, None, None


def layer_class(name, file):
    """A class of this name, as if it came from TransformerEngine's file."""
    return type(name, (nn.Module,), {"__module__": f"transformer_engine.pytorch.module.{file}"})


def dress(layer, gemms, fp8=True):
    """Give a layer what TransformerEngine's base class gives it."""
    forward = Delayed(3 * gemms, "kFloat8E4M3", [100.0, 400.0, 1.0, 50.0, 300.0, 1.0][: 3 * gemms])
    backward = Delayed(2 * gemms, "kFloat8E5M2", [5000.0, 1.0, 9000.0, 1.0][: 2 * gemms])
    layer.fp8, layer.activation_dtype = fp8, torch.float32
    layer.fp8_meta = {"scaling_fwd": forward, "scaling_bwd": backward, "recipe": SimpleNamespace(margin=0)}
    layer.quantizers = {"scaling_fwd": forward.make_quantizers(), "scaling_bwd": backward.make_quantizers()}
    return layer


def product(layer, gemm, x, w):
    forward, backward = layer.quantizers["scaling_fwd"], layer.quantizers["scaling_bwd"]
    return Product.apply(x, w, forward[3 * gemm], forward[3 * gemm + 1], backward[2 * gemm])


class Linear(layer_class("Linear", "linear")):
    def __init__(self, fp8=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 32))
        self.weight_names = ["weight"]
        dress(self, 1, fp8)

    def forward(self, inp):
        if not self.fp8:
            return F.linear(inp, self.weight)
        return product(self, 0, inp.reshape(-1, 32), self.weight).view(*inp.shape[:-1], 24)


def made(layer, key, place):
    """What a quantizer of the layer made: the tensor, its codes, and the amax that it left in the history."""
    return layer.quantizers[key][place].made[-1]


def test_known_by_name_and_by_the_names_of_their_bases():
    assert isinstance(kind_of(Linear()), TransformerEngine)
    Fused = type("TEColumnParallelLinear", (Linear,), {"__module__": "megatron.core.extensions.transformer_engine"})
    assert isinstance(kind_of(Fused()), TransformerEngine)
    assert kind_of(type("Linear", (nn.Module,), {"__module__": "mine"})()) is None


def test_delayed_scales_and_how_far_amaxes_ran_from_their_history():
    torch.manual_seed(0)
    model, x = nn.Sequential(Linear()), torch.randn(3, 16, 32)

    def step():
        model(x).cos().mean().backward()

    found, notes = recorded(model, step)
    assert notes == ""
    assert sorted(found) == ["0:grad_output", "0:input", "0:weight"]
    for role, key, place in (
        ("input", "scaling_fwd", 0),
        ("weight", "scaling_fwd", 1),
        ("grad_output", "scaling_bwd", 0),
    ):
        tensor, q, amax = made(model[0], key, place)
        row = found[f"0:{role}"]
        check(row, ng.measure(tensor, q))
        np.testing.assert_allclose(row["scale_max"], q.scale.item(), rtol=1e-6)
        assumed = q.fmt.max * q.scale.item()
        np.testing.assert_allclose(row["amax_ratio"], amax.item() / assumed, rtol=1e-6)
    assert found["0:weight"]["amax_ratio"] > 1  # its history had seen less, so it saturates
    assert found["0:weight"]["saturation_pct"] > 0


def test_its_history_is_read_and_not_written():
    torch.manual_seed(1)
    histories = []
    for watched in (False, True):
        torch.manual_seed(2)
        model, x = nn.Sequential(Linear()), torch.randn(16, 32)

        def step(model=model, x=x):
            model(x).cos().mean().backward()

        recorded(model, step) if watched else step()
        histories.append([model[0].fp8_meta[key].amax_history.clone() for key in ("scaling_fwd", "scaling_bwd")])
        histories[-1] += [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*histories, strict=True))


def test_in_a_loop_each_step_is_counted_by_the_scale_that_its_own_products_used():
    """The forward's scales move on as the autocast ends, before the backward; the backward's, behind it."""
    torch.manual_seed(8)
    model = nn.Sequential(Linear())
    meta, scales = model[0].fp8_meta, []

    def step():
        y = model(torch.randn(16, 32))
        meta["scaling_fwd"].update()
        y.cos().mean().backward()
        meta["scaling_bwd"].update()
        with torch.no_grad():
            model[0].weight.mul_(1.5)

    for _ in range(4):
        found, _ = recorded(model, step)
        for role, key, place in (
            ("input", "scaling_fwd", 0),
            ("weight", "scaling_fwd", 1),
            ("grad_output", "scaling_bwd", 0),
        ):
            tensor, q, amax = made(model[0], key, place)
            row, scale = found[f"0:{role}"], q.scale.item()
            check(row, ng.measure(tensor, q))
            np.testing.assert_allclose(row["scale_max"], scale, rtol=1e-6)
            np.testing.assert_allclose(row["amax_ratio"], amax.item() / (q.fmt.max * scale), rtol=1e-6)
            scales.append(scale)
    assert len(set(scales)) == len(scales)  # no step's scale is another's, so that none can stand in for it


def test_outside_of_its_autocast_a_layer_is_judged_as_a_plain_one():
    torch.manual_seed(3)
    model, x = nn.Sequential(Linear(fp8=False)), torch.randn(16, 32)
    found, _ = recorded(model, lambda: model(x).cos().mean().backward())
    check(found["0:input"], ng.measure(x, ng.quantize(x, E4M3FN)))
    assert np.isnan(found["0:input"]["amax_ratio"])


class LayerNormLinear(layer_class("LayerNormLinear", "layernorm_linear")):
    def __init__(self, normalization, centered):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = nn.Parameter(torch.rand(32)), nn.Parameter(torch.rand(32))
        self.q_weight, self.k_weight = nn.Parameter(torch.randn(24, 32)), nn.Parameter(torch.randn(8, 32))
        self.weight_names = ["q_weight", "k_weight"]
        self.normalization, self.zero_centered_gamma, self.eps = normalization, centered, 1e-5
        dress(self, 1)

    def forward(self, inp):
        gamma = self.layer_norm_weight + self.zero_centered_gamma
        if self.normalization == "RMSNorm":
            h = inp * (inp.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gamma
        else:
            h = F.layer_norm(inp, (32,), gamma, self.layer_norm_bias, self.eps)
        return product(self, 0, h, torch.cat([self.q_weight, self.k_weight])), h  # return_layernorm_output


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_a_layer_that_norms_shows_what_it_multiplies(normalization, centered):
    torch.manual_seed(4)
    model, x = nn.Sequential(LayerNormLinear(normalization, centered)), torch.randn(64, 32)
    found, notes = recorded(model, lambda: model(x)[0].cos().mean().backward())
    tensor, q, _ = made(model[0], "scaling_fwd", 0)
    row, want = found["0:input"], ng.measure(tensor, q)
    for name in ("amax", "std", "sqnr_db"):
        np.testing.assert_allclose(row[name], want[name], rtol=1e-3)
    check(found["0:weight"], ng.measure(*made(model[0], "scaling_fwd", 1)[:2]))
    check(found["0:grad_output"], ng.measure(*made(model[0], "scaling_bwd", 0)[:2]))
    assert notes == ""


class LayerNormMLP(layer_class("LayerNormMLP", "layernorm_mlp")):
    def __init__(self):
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.rand(32))
        self.fc1_weight, self.fc2_weight = nn.Parameter(torch.randn(40, 32)), nn.Parameter(torch.randn(32, 40))
        self.normalization, self.zero_centered_gamma, self.eps = "RMSNorm", False, 1e-5
        dress(self, 2)

    def forward(self, inp):
        h = F.rms_norm(inp, (32,), self.layer_norm_weight, self.eps)
        return product(self, 1, F.gelu(product(self, 0, h, self.fc1_weight)), self.fc2_weight)


def test_of_two_products_in_one_layer_the_hidden_half_is_named():
    torch.manual_seed(5)
    model, x = nn.Sequential(LayerNormMLP()), torch.randn(16, 32)
    found, notes = recorded(model, lambda: model(x).cos().mean().backward())
    assert sorted(found) == ["0.fc1:input", "0.fc1:weight", "0.fc2:grad_output", "0.fc2:weight"]
    check(found["0.fc1:weight"], ng.measure(*made(model[0], "scaling_fwd", 1)[:2]))
    check(found["0.fc2:weight"], ng.measure(*made(model[0], "scaling_fwd", 4)[:2]))
    check(found["0.fc2:grad_output"], ng.measure(*made(model[0], "scaling_bwd", 2)[:2]))
    assert notes == (
        "The input of fc2 and the gradient of fc1 never leave TransformerEngine's LayerNormMLP, and are not recorded."
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_whole_in_a_tensor_parallel_layer_counts_once(two_ranks, sequence):
    x, copies = torch.randn(16, 32), {}
    for name, layer, told in (
        ("column", Linear(), {"parallel_mode": "column"}),
        ("row", Linear(), {"parallel_mode": "row"}),
        ("duplicated", Linear(), {"parallel_mode": None}),
        ("both", LayerNormMLP(), {"set_parallel_mode": True}),
    ):
        vars(layer).update(told, tp_group=two_ranks, sequence_parallel=sequence)
        copies[name] = [part.copies for part in TransformerEngine().parts(layer, (x,), {}, layer(x))]
    both, nobody = Copies(("input", "grad_output"), 0), Copies()
    alike = {"column": [Copies(("input",), 0)], "row": [Copies(("grad_output",), 0)], "both": [both, both]}
    apart = {"column": [nobody], "row": [nobody], "both": [nobody, nobody]}
    assert copies == {**(apart if sequence else alike), "duplicated": [nobody]}


class GroupedLinear(layer_class("GroupedLinear", "grouped_linear")):
    def __init__(self):
        super().__init__()
        self.num_gemms = 2
        self.weight0, self.weight1 = nn.Parameter(torch.randn(24, 32)), nn.Parameter(torch.randn(24, 32))
        dress(self, 2)

    def forward(self, inp, m_splits):
        parts = zip(inp.split([int(m) for m in m_splits]), (self.weight0, self.weight1), strict=True)
        return torch.cat([product(self, i, x, w) for i, (x, w) in enumerate(parts)])


@pytest.mark.parametrize("splits", [[10, 6], torch.tensor([10, 6])])
def test_each_expert_has_its_own_scales_and_its_own_rows(splits):
    torch.manual_seed(6)
    model, x = GroupedLinear(), torch.randn(16, 32)
    root = nn.ModuleDict({"experts": model})
    found, notes = recorded(root, lambda: model(x, splits).cos().mean().backward())
    assert len(found) == 6
    for i in range(2):
        check(found[f"experts.{i}:input"], ng.measure(*made(model, "scaling_fwd", 3 * i)[:2]))
        check(found[f"experts.{i}:weight"], ng.measure(*made(model, "scaling_fwd", 3 * i + 1)[:2]))
        check(found[f"experts.{i}:grad_output"], ng.measure(*made(model, "scaling_bwd", 2 * i)[:2]))
    assert notes == ""


def test_quantizers_without_a_history_are_rules_of_ours():
    def quantizer(kind, **held):
        return type(kind, (), {"dtype": DType.kFloat8E4M3, **held})()

    current = rule_of(quantizer("Float8CurrentScalingQuantizer", force_pow_2_scales=False), "input", 0)
    assert current.operand == ng.recipes.CURRENT.fprop.a
    assert current.given is None
    pow2 = quantizer("Float8CurrentScalingQuantizer", force_pow_2_scales=True, amax_epsilon=1e-6)
    assert (rule := rule_of(pow2, "input", 0).operand.scaling).power_of_two
    assert rule.amax_floor == 1e-6
    for dim, block in ((1, BLOCK_1x128), (2, BLOCK_128x128)):
        held = {"block_len": 128, "block_scaling_dim": dim, "force_pow_2_scales": True, "amax_epsilon": 0.0}
        operand = rule_of(quantizer("Float8BlockQuantizer", **held), "weight", 0).operand
        assert (operand.granularity, operand.scaling) == (block, CURRENT_POW2)
    held["force_pow_2_scales"] = False
    assert rule_of(quantizer("Float8BlockQuantizer", **held), "weight", 0).operand.scaling == CURRENT
    assert rule_of(quantizer("MXFP8Quantizer"), "input", 0).operand == ng.recipes.MXFP8.fprop.a
    assert rule_of(quantizer("MXFP8Quantizer"), "input", 0).operand.granularity == BLOCK_1x32


def test_a_quantizer_is_asked_once_for_as_long_as_nothing_in_it_is_another(monkeypatch):
    asked = []
    inner = te_quantizers._rule_of
    monkeypatch.setattr(te_quantizers, "_rule_of", lambda *args: asked.append(args) or inner(*args))

    def rule(margin=0):
        asked.clear()
        return rule_of(slots[0], "input", margin), len(asked)

    slots = [quantizer := Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), "kFloat8E4M3")]
    first, _ = rule()
    quantizer.scale.fill_(3.0)  # in place, as TransformerEngine does
    assert rule() == (first, 0)
    assert first.given.inv_scale.item() == 3
    assert rule(margin=1)[1] == rule(margin=0)[1] == 1
    quantizer.scale.data = torch.tensor([4.0])  # the same object, elsewhere
    found, times = rule()
    assert (found.given.inv_scale.item(), times) == (4, 1)
    quantizer.scale = torch.tensor([5.0])
    found, times = rule()
    assert (found.given.inv_scale.item(), times) == (5, 1)
    quantizer.dtype = DType.kFloat8E5M2
    assert rule()[0].operand.fmt is E5M2
    assert rule()[1] == 0
    quantizer.with_amax_reduction = True
    assert "reduced over ranks" in rule()[0]
    quantizer.with_amax_reduction = False
    assert rule()[1] == 1
    quantizer.scale = torch.tensor([6.0], dtype=torch.float64)  # ours would be a copy, and stay as it is
    assert rule()[1] == rule()[1] == 1
    held = len(te_quantizers._KNOWN)
    asked.clear()
    slots.clear()
    del quantizer
    assert len(te_quantizers._KNOWN) == held - 1


class Slots:
    __slots__ = ("__weakref__", "amax_epsilon", "dtype", "force_pow_2_scales")


def test_a_quantizer_may_get_and_lose_what_is_read_of_it():
    def quantizer(base):
        made = type("Float8CurrentScalingQuantizer", (base,), {})()
        made.dtype, made.force_pow_2_scales = DType.kFloat8E4M3, False
        return made

    for base in (Slots, SimpleNamespace):
        one = quantizer(base)
        before = rule_of(one, "input", 0)
        assert rule_of(one, "input", 0) is before
        one.amax_epsilon = 0.5
        assert rule_of(one, "input", 0).operand.scaling.amax_floor == 0.5
        del one.amax_epsilon
        assert rule_of(one, "input", 0) == before
        type(one).with_amax_reduction = True
        assert "reduced over ranks" in rule_of(one, "input", 0)


def test_what_cannot_be_known_is_named():
    fp4 = type("NVFP4Quantizer", (), {"dtype": DType.kFloat4E2M1})()
    assert rule_of(fp4, "input", 0) == (
        "TransformerEngine quantizes the input of some layers by a NVFP4Quantizer, which is not known here; not "
        "recorded."
    )
    assert "high precision" in rule_of(None, "grad_output", 0)
    reduced = type("Float8CurrentScalingQuantizer", (), {"with_amax_reduction": True})()
    assert "reduced over ranks" in rule_of(reduced, "input", 0)


def test_a_quantizer_of_two_directions_is_read_by_the_first_that_is_in_fp8():
    high = type("IdentityQuantizer", (), {})()
    codes = type("Codes", (type(high),), {})()
    by = SimpleNamespace(force_pow_2_scales=True, dtype="kFloat8E4M3", block_len=128, block_scaling_dim=1)
    block = type("Float8BlockQuantizer", (SimpleNamespace,), {})(**vars(by))
    codes.of = block

    def of(rows, columns):
        return rule_of(SimpleNamespace(rowwise_quantizer=rows, columnwise_quantizer=columns), "input", 0)

    rule = rule_of(block, "input", 0)
    assert rule.operand.granularity == BLOCK_1x128
    assert of(block, high) == of(codes, high) == rule_of(codes, "input", 0) == rule
    assert "only for a second product, by column" in of(high, block)
    block.block_scaling_dim = 2
    assert of(high, block).operand.granularity == BLOCK_128x128
    assert of(high, high) == rule_of(high, "input", 0) == rule_of(None, "input", 0)
    assert "leaves the input of some layers in high precision" in of(high, high)
