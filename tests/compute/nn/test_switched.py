"""Products and operands that stay high: bit-equal to the plain layer's, the rest bit-equal to the converted one's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.compute.nn.layers import Seen, adopt_all, calc_diff
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.compute.quant import quantize
from narrowgauge.compute.recipes import BLOCKWISE, CATALOG, CURRENT, DELAYED, fake
from narrowgauge.compute.recipes.switched import OPERANDS, switched
from narrowgauge.errors import ConversionError, RecipeError

RESULTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


def layer(recipe=None, dtype=torch.float32, k=64, n=48):
    """The same layer every time, converted if a recipe is given."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(k, n)).to(dtype)
    if recipe is not None:
        adopt_all(module, recipe)
    return module


def run(module, dtype=torch.float32, autocast=False):
    """y, dx, dw, db of one forward and a random upstream gradient."""
    generator = torch.Generator().manual_seed(2)
    weight = module[0].weight
    x = torch.randn(2, 16, weight.shape[1], generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(2, 16, weight.shape[0], generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    y.backward(dy.to(y.dtype))
    return {"x": x, "y": y.detach(), "dx": x.grad, "dw": weight.grad, "db": module[0].bias.grad, "dy": dy.to(y.dtype)}


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("gemm", OPERANDS)
def test_a_product_that_is_switched_off_is_the_unconverted_layers_and_the_others_stay(gemm, recipe):
    plain, converted = run(layer()), run(layer(recipe))
    found = run(layer(switched(recipe, [gemm])))
    for name, result in RESULTS.items():
        want = plain if name == gemm else converted
        assert torch.equal(found[result], want[result]), name
        assert not torch.equal(plain[result], converted[result])
    assert torch.equal(found["db"], converted["db"])


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, False), (torch.float32, True)])
def test_in_other_dtypes(dtype, autocast):
    plain = run(layer(dtype=dtype), dtype, autocast)
    for gemm, result in RESULTS.items():
        found = run(layer(switched(CURRENT, [gemm]), dtype), dtype, autocast)
        assert found[result].dtype == plain[result].dtype
        assert torch.equal(found[result], plain[result]), gemm


def dequantized(x, operand):
    return quantize(x, operand.fmt, operand.granularity, scaling=operand.scaling, margin=operand.margin).dequantize()


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKWISE], ids=lambda r: r.name)
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_an_operand_that_stays_high_is_multiplied_with_what_the_others_codes_stand_for(role, recipe):
    found = run(layer(switched(recipe, roles=[role])))
    fp8 = run(layer(recipe))
    x, dy = found["x"].detach().reshape(32, 64), found["dy"].reshape(32, 48)
    w = layer()[0].weight.detach()
    operands = {
        "fprop": (x, w, found["y"] - layer()[0].bias.detach()),
        "dgrad": (dy, w.T, found["dx"]),
        "wgrad": (dy.T, x.T, found["dw"]),
    }
    for gemm, (a, b, got) in operands.items():
        rules = getattr(recipe, gemm)
        if role not in OPERANDS[gemm]:
            assert torch.equal(found[RESULTS[gemm]], fp8[RESULTS[gemm]])
            continue
        a, b = a.contiguous(), b.contiguous()
        a = a if OPERANDS[gemm][0] == role else dequantized(a, rules.a)
        b = b if OPERANDS[gemm][1] == role else dequantized(b, rules.b)
        exact = a.double() @ b.double().T
        assert calc_diff(exact, got.reshape(exact.shape)) < 1e-12, gemm


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, BLOCKWISE], ids=lambda r: r.name)
def test_bf16_gemms_on_fp8_tensors_are_those_of_the_fake_recipe(recipe):
    found, want = run(layer(switched(recipe, keep="bf16_gemm"))), run(layer(fake(recipe)))
    for result in ("y", "dx", "dw", "db"):
        assert torch.equal(found[result], want[result]), result


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=lambda r: r.name)
def test_gradients_against_float64_with_everything_high_but_one_product(recipe):
    exact = layer(dtype=torch.float64)
    want = run(exact, torch.float64)
    found = run(layer(switched(recipe, ["fprop", "dgrad"])))
    assert calc_diff(want["y"], found["y"]) < 1e-12
    assert calc_diff(want["dx"], found["dx"]) < 1e-12
    assert calc_diff(want["db"], found["db"]) < 1e-12
    assert 1e-6 < calc_diff(want["dw"], found["dw"]) < 2.5e-3  # E5M2 by E4M3


def blocks(recipe="current", high=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return ng.convert(model, recipe, high=high)[0]


def train(model, call, steps=3):
    """Everything that came out of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        for _ in range(2):
            x = torch.randn(32, 64, generator=generator, requires_grad=True)
            y = call(x)
            y.backward(torch.randn(y.shape, generator=generator))
            found += [y.detach(), x.grad]
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + list(ng.scaling_state(model).values())


HIGH = [{"sites": "0", "gemms": "wgrad"}, {"sites": "2", "roles": "weight"}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_compiled_it_is_one_graph_and_the_same_bits(recipe):
    torch._dynamo.reset()
    eager, model = blocks(recipe, HIGH), blocks(recipe, HIGH)
    seen, seen_eager = Seen(), Seen()
    set_observer(model, seen)
    set_observer(eager, seen_eager)
    counter = CompileCounterWithBackend("aot_eager")
    found = train(model, torch.compile(model, backend=counter, fullgraph=True))
    want = train(eager, eager)
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert counter.frame_count == 1
    assert seen.counts() == seen_eager.counts()
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit_and_shows_each_tensor_once(reentrant):
    straight, model = blocks("delayed", HIGH), blocks("delayed", HIGH)
    seen, seen_straight = Seen(), Seen()
    set_observer(model, seen)
    set_observer(straight, seen_straight)
    found = train(model, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    want = train(straight, straight)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert seen.counts() == seen_straight.counts()


def test_delayed_scales_see_the_same_tensors_whatever_stays_high():
    def histories(high):
        model = blocks("delayed", high)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same tensors in every step
        for _ in range(3):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
        return ng.scaling_state(model)

    # Only dgrad and wgrad of the last layer: what flows forward is the same, and so is the gradient that enters it.
    whole, some = histories(()), histories([{"sites": "2", "gemms": ["dgrad"]}])
    last = [key for key in whole if ".2." in key]
    assert last
    for key in last:
        assert torch.equal(whole[key], some[key]), key


def test_an_operand_is_shown_if_any_product_quantizes_it_and_every_result_is():
    model = blocks("current", [{"sites": "0", "gemms": ["fprop", "wgrad"]}])
    seen = Seen()
    set_observer(model, seen)
    x = torch.randn(8, 64, requires_grad=True)
    model(x).sum().backward()
    operands = {role for module, role in seen.operands if module == "0"}
    results = {role for module, role in seen.results if module == "0"}
    assert operands == {"weight", "grad_output"}
    assert results == {"output", "grad_input", "grad_weight"}


def test_without_grad_nothing_is_saved_and_the_product_is_the_same():
    model = blocks("current", HIGH)
    x = torch.randn(8, 64)
    with torch.no_grad():
        quiet = model(x)
    assert torch.equal(quiet, model(x))


def test_a_second_derivative_is_refused_not_wrong():
    model = blocks("current", HIGH)
    x = torch.randn(8, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice a converted layer: .*\[convert\]"):
        dx.sum().backward()


def test_a_frozen_weight_gets_no_gradient():
    model = blocks("current", HIGH)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(8, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert model[0].weight.grad is None


def test_a_copy_keeps_its_switches():
    model = blocks("current", HIGH)
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(train(model, model), train(twin, twin), strict=True))


def test_the_report_says_what_stays_high_and_what_it_costs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    high = [{"sites": ["0"]}, {"sites": ["1"], "gemms": ["wgrad"]}, {"roles": ["input"], "sites": ["!0"]}]
    _, report = ng.convert(model, "current", high=high)
    rows = {row.name: (row.recipe, row.reason.partition("; ")[2] or row.reason) for row in report.rows}
    assert rows == {
        "0": (None, "high= keeps all of its products"),
        "1": ("current", "fprop input high, wgrad high"),
        "2": ("current", "fprop input high, wgrad input high"),
    }
    assert type(model[0]) is nn.Linear
    assert report.coverage == pytest.approx((1 + 1) / 9)  # dgrad of two layers
    assert [note for note in report.notes if note.startswith("note: 2 converted layers keep a product or an operand")]


@pytest.mark.parametrize(
    ("high", "error", "says"),
    [
        ({"sites": ["fc9"]}, ConversionError, "high 'fc9' matches no module of the model"),
        ({"sites": ["!fc9"]}, ConversionError, "high 'fc9' matches no module of the model"),
        ({"site": ["0"]}, ConversionError, "high: there is no 'site'; did you mean 'sites'?"),
        ({"gemms": ["fwd"]}, RecipeError, "there is no gemm 'fwd'"),
        ({"roles": ["output"]}, RecipeError, "there is no operand 'output'"),
        ({"keep": "bf16"}, RecipeError, "there is no keep 'bf16'; did you mean 'bf16_gemm'?"),
        ({"keep": "bf16_gemm", "roles": ["input"]}, RecipeError, "quantizes both operands; leave roles=['input'] out"),
        ({"gemms": ["dgrad"], "roles": ["input"]}, RecipeError, "'input' is no operand of dgrad"),
    ],
)
def test_wrong_switches_are_told_and_leave_the_model_as_it_was(high, error, says):
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(error) as raised:
        ng.convert(model, "current", high=[high])
    assert says in str(raised.value)
    assert type(model[0]) is nn.Linear


def test_switches_add_up():
    once = switched(CURRENT, ["wgrad"], ["input"])
    assert once.wgrad.high == "b"
    assert switched(once, ["wgrad"], ["grad_output"]).wgrad.high == "ab"
    assert switched(once, keep="bf16_gemm").wgrad.high == "b"  # multiplied high anyway
    assert switched(switched(CURRENT, keep="bf16_gemm"), ["fprop"]).fprop.high == "ab"


def test_linear_of_the_high_side_is_torchs_own():
    module = layer(switched(CURRENT, ["fprop"]))
    x = torch.randn(3, 64)
    assert torch.equal(module(x), F.linear(x, module[0].weight, module[0].bias))
