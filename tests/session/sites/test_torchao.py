"""torchao's Float8Linear: its own codes, bit by bit, and the numbers that follow from them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.session.sites.recorded import check, recorded
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.compute.quant import PerRow, PerTensor, QTensor, quantize
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.session.sites.torchao import _rule
from narrowgauge.session.sites.torchao_casts import Casts

pytest.importorskip("torchao.float8")
pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "pow2")


def converted(recipe, *layers):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8LinearConfig as Config

    if recipe == "pow2":
        config = Config(emulate=True, round_scales_to_power_of_2=True)
    else:
        base = Float8LinearConfig.from_recipe_name(recipe)
        config = Config(**{**vars(base), "emulate": True})
    return convert_to_float8_training(nn.Sequential(*layers), config=config)


def theirs(layer, x, role):
    """What torchao's own function makes of a matrix, as codes and scale of ours."""
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    cast = getattr(layer.config, f"cast_config_{role}")
    made = hp_tensor_to_float8_dynamic(
        x.detach(),
        cast.target_dtype,
        layer.linear_mm_config,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, cast.scaling_granularity),
        round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
    )
    fmt = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}[made._data.dtype]
    scale = made._scale.reciprocal()
    return QTensor(made._data, scale, fmt, PerRow() if scale.dim() else PerTensor())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_codes_and_scales_are_its_own_bit_by_bit(recipe, role):
    torch.manual_seed(0)
    layer = converted(recipe, nn.Linear(64, 32))[0]
    for x in (
        torch.randn(96, 64),
        torch.randn(96, 64).bfloat16() * 1e-4,
        torch.zeros(4, 64),
        torch.full((4, 64), 1e-20),
    ):
        rule = _rule(layer.config, role, x)
        assert _rule(layer.config, role, x).operand is rule.operand  # what is prepared for it is found again
        ours = quantize(x, rule.operand.fmt, rule.operand.granularity, scaling=rule.operand.scaling)
        want = theirs(layer, x, role)
        assert torch.equal(ours.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(ours.scale, want.scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_program_that_torchao_converted_shows_what_torchao_does(recipe):
    torch.manual_seed(1)
    model = converted(recipe, nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
    x = torch.randn(2, 48, 64)
    tensors = {}

    def step():
        h = model[0](x)
        t = model[1](h)
        y = model[2](t)
        for made in (h, y):
            made.retain_grad()
        y.square().mean().backward()
        for name, tensor in (("0:input", x), ("0:weight", model[0].weight), ("0:grad_output", h.grad)):
            tensors[name] = tensor
        for name, tensor in (("2:input", t), ("2:weight", model[2].weight), ("2:grad_output", y.grad)):
            tensors[name] = tensor

    found, notes = recorded(model, step)
    assert notes == ""
    assert sorted(found) == sorted(tensors)
    for site, tensor in tensors.items():
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        q = theirs(model[int(site[0])], matrix, site.split(":")[1])
        check(found[site], ng.measure(matrix, q))
        np.testing.assert_allclose(found[site]["scale_max"], q.scale.max().item(), rtol=1e-6)


def test_microbatches_under_a_checkpoint_count_once():
    torch.manual_seed(2)
    model = converted("tensorwise", nn.Linear(64, 32))
    micro, gradients = [torch.randn(16, 64) * (i + 1) for i in range(2)], []

    def step():
        for x in micro:
            y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
            y.register_hook(lambda g: gradients.append(g.clone()))
            y.cos().sum().backward()

    found, _ = recorded(model, step)
    for role, parts in (("input", micro), ("grad_output", gradients)):
        row, both = found[f"0:{role}"], torch.cat(parts).detach()
        assert row["numel"] == both.numel()
        np.testing.assert_allclose(row["amax"], both.abs().max().item(), rtol=1e-6)
        error = torch.cat([theirs(model[0], p, role).dequantize() - p.detach() for p in parts]).double()
        want = 10 * np.log10((both.double().square().sum() / error.square().sum()).item())
        np.testing.assert_allclose(row["sqnr_db"], want, rtol=1e-5)
    scales = [theirs(model[0], p, "input").scale.item() for p in micro]
    np.testing.assert_allclose(
        [found["0:input"]["scale_min"], found["0:input"]["scale_max"]], sorted(scales), rtol=1e-6
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_nobody_is_asked_for_casts_of_plain_tensors(recipe, monkeypatch):
    """They take the shortest way there is."""
    asked = []
    monkeypatch.setattr(Casts, "show", lambda *args: asked.append(args) or False)
    model = converted(recipe, nn.Linear(64, 32))
    found, notes = recorded(model, lambda: model(torch.randn(2, 48, 64)).square().mean().backward())
    assert (sorted(found), notes) == ([f"0:{role}" for role in ("grad_output", "input", "weight")], "")
    assert not asked


def test_a_configuration_that_can_change_is_asked_again():
    config = converted("tensorwise", nn.Linear(64, 32))[0].config
    other = converted("pow2", nn.Linear(64, 32))[0].config
    x = torch.ones(2, 2)
    assert _rule(config, "input", x) is _rule(config, "input", x)
    changing = SimpleNamespace(**vars(config))
    before = _rule(changing, "input", x)
    changing.round_scales_to_power_of_2 = other.round_scales_to_power_of_2
    assert _rule(changing, "input", x) == _rule(other, "input", x) != before


def test_an_operand_that_stays_high_is_named():
    from torchao.float8.config import CastConfig, ScalingType

    config = converted("tensorwise", nn.Linear(64, 32))[0].config
    casts = ("cast_config_weight", "cast_config_weight_for_grad_input")
    high = SimpleNamespace(**{**vars(config), **dict.fromkeys(casts, CastConfig(scaling_type=ScalingType.DISABLED))})
    said = _rule(high, "weight", torch.ones(2, 2))
    assert said == "torchao leaves the weight of a Float8Linear in high precision; it is not recorded."


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_adapters_beside_quantized_weights_are_seen_and_these_are_noted(kind, tmp_path):
    import torchao.quantization as theirs

    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(64, 64, bias=False), "adapter": nn.Linear(64, 64, bias=False)})
    model.to(torch.bfloat16)["base"].requires_grad_(False)
    model.forward = lambda x: model["base"](x) + model["adapter"](x)
    theirs.quantize_(model["base"], getattr(theirs, kind)())
    optimizer = torch.optim.SGD(model["adapter"].parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=1) as watching:
        model(torch.randn(32, 64, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    run = ng.open_run(watching.folder)
    of_adapter = {f"adapter:{role}" for role in ("input", "weight", "grad_output")}
    assert of_adapter | {"base:input"} <= set(run.sites)
    assert "base:weight" not in run.sites
    assert run.meta["weights_hash"]
    notes = " ".join(run.meta["notes"])
    assert "no quantizer takes them: weight " in notes
    assert "failed" not in notes
