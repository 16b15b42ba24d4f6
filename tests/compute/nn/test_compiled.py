"""Under torch.compile: the eager numbers to the last bit, one graph, and nothing compiled twice."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.compute.nn.layers import Seen, assert_same, calc_diff, train_on
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.compute.nn.tracing.in_graph import CODES, REMADE
from narrowgauge.compute.recipes import CATALOG
from narrowgauge.errors import ShapeError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256, bias=bias), nn.Linear(256, 128, bias=bias)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks(recipe, count=1, **kwargs):
    torch.manual_seed(0)
    return ng.convert(nn.Sequential(*(Block(**kwargs) for _ in range(count))), recipe=recipe)[0]


def compiled(model):
    # The compiler's front end and autograd without code generation: what is emitted is the operators themselves.
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


def train(model, call, steps=3, microbatches=1):
    return train_on(model, call, [(4, 32, 128)] * steps, microbatches)


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_the_same_bits_as_eager_from_one_graph(recipe):
    eager, model = blocks(recipe), blocks(recipe)
    call, counter = compiled(model)
    assert_same(train(model, call), train(eager, eager))
    assert counter.frame_count == 1  # no break (fullgraph would raise), and no step compiled it again
    x = torch.randn(2, 32, 128)
    with torch.no_grad():
        assert torch.equal(call(x), eager(x))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_several_microbatches_and_no_bias(recipe):
    eager, model = blocks(recipe, bias=False), blocks(recipe, bias=False)
    call, counter = compiled(model)
    assert_same(train(model, call, microbatches=3), train(eager, eager, microbatches=3))
    assert counter.frame_count == 1


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_codes_left_to_the_graph_change_no_bit(recipe, microbatches):
    eager, model = blocks(recipe), blocks(recipe)
    seen = Seen()
    set_observer(model, seen)
    call, counter = compiled(model)
    assert_same(train(model, call, microbatches=microbatches), train(eager, eager, microbatches=microbatches))
    assert counter.frame_count == 1
    assert set(seen.counts().values()) == {3 * microbatches}
    checks = [check for results in seen.results.values() for _, check in results if check is not None]
    assert len(checks) == 6 * microbatches
    if recipe.state == "none":  # where scales lag behind, these jumps saturate
        assert all(calc_diff(check.want, check.got) < 3e-3 for check in checks)


@pytest.mark.parametrize(
    ("recipe", "saves", "tokens"),
    [
        ("current", CODES, 64),
        ("current", REMADE, 64),
        ("rowwise", REMADE, 64),
        ("blockwise", REMADE, 160),
        ("blockwise", REMADE, 256),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_the_graph_computes_is_exact(dtype, recipe, saves, tokens):
    eager, model = blocks(recipe).to(dtype), blocks(recipe).to(dtype)
    for block in model:
        for layer in (block.up, block.down):
            layer._fp8.save(saves)
    call, counter = compiled(model)
    for factor in (1.0, 0.0, 1e-6, float("inf"), float("nan")):
        x = torch.randn(tokens, 128, dtype=dtype)
        x[3, 5] *= factor
        x = x * 0 if factor == 0 else x
        found = []
        for each, module in ((eager, eager), (call, model)):
            mine = x.clone().requires_grad_()
            y = each(mine)
            y.backward(torch.linspace(-3, 5, y.numel(), dtype=dtype).reshape(y.shape))
            found.append([y, mine.grad, *(p.grad for p in module.parameters())])
            module.zero_grad()
        for a, b in zip(*found, strict=True):
            assert torch.equal(a.isnan(), b.isnan()), factor
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), factor
    assert counter.frame_count == 1  # of one graph, whatever the numbers


@pytest.mark.parametrize("fmt", ["e4m3fnuz", "e5m2fnuz", "e5m2"])
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_a_format_that_is_not_left_to_the_graph_trains_all_the_same(recipe, fmt):
    layers = [nn.Linear(64, 32, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, rule = torch.randn(128, 64), ng.recipes.by_name(recipe).with_(input=fmt)
    for layer, backend in zip(layers, (None, "aot_eager"), strict=True):
        model, _ = ng.convert(nn.Sequential(layer), recipe=rule, backend="reference")
        call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        call(x).square().sum().backward()
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)


def test_the_compiler_is_told_what_room_a_product_takes():
    model = blocks("blockwise")
    graphs = []

    def backend(graph, example_inputs):
        def keep(traced, _):
            graphs.append(traced)
            return make_boxed_func(traced.forward)

        return aot_autograd(fw_compiler=keep)(graph, example_inputs)

    x = torch.randn(256, 128, requires_grad=True)
    torch.compile(model, backend=backend)(x).sum().backward()
    products = [node for node in graphs[-1].graph.nodes if "linear_backward" in str(node.target)]
    rooms = [node.args[10].meta["val"] for node in products]
    # both codes of dy [M, N] and those of w [N, K], a byte each; twice
    assert [room.numel() for room in rooms] == [2 * 128 * (2 * 256 + 256), 2 * 256 * (2 * 256 + 128)]
    assert all(room.untyped_storage().nbytes() == 1 for room in rooms)


def test_convert_chooses_what_is_saved():
    for recipe, plain, codes in (("delayed", REMADE, CODES), ("rowwise", REMADE, CODES), ("mxfp8", CODES, CODES)):
        for kwargs, want in (({}, plain), ({"save_codes": True}, codes)):
            model, _ = ng.convert(nn.Sequential(Block()), recipe=recipe, **kwargs)
            assert model[0].up._fp8.traced.saves == want


def test_a_block_compiled_once_serves_every_block():
    eager, model = blocks("delayed", 6), blocks("delayed", 6)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    assert_same(train(model, model), train(eager, eager))
    assert counter.frame_count == 1


def test_who_watches_changes_without_compiling_again():
    model, seen = blocks("delayed"), Seen()
    call, counter = compiled(model)
    train(model, call, steps=1)
    set_observer(model, seen)
    train(model, call, steps=3)
    set_observer(model, None)
    train(model, call, steps=1)
    assert counter.frame_count == 1
    roles = ("input", "weight", "grad_output", "output", "grad_input", "grad_weight")
    assert seen.counts() == {(f"0.{name}", role): 3 for name in ("up", "down") for role in roles}
    checked = [role for (_, role), results in seen.results.items() for _, check in results if check is not None]
    assert sorted(checked) == sorted(2 * ["grad_input", "grad_weight", "output"])  # one result a step, in turn


def test_under_autocast_the_result_has_its_dtype():
    eager, model = blocks("current"), blocks("current")
    call, _ = compiled(model[0].up)
    x = torch.randn(4, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = call(x), eager[0].up(x)
    assert y.dtype == want.dtype == torch.bfloat16
    assert torch.equal(y, want)


def test_a_recomputed_forward_is_seen_once():
    model, seen = blocks("delayed"), Seen()
    set_observer(model, seen)
    call, _ = compiled(lambda x: checkpoint(model[0], x, use_reentrant=False))
    plain = blocks("delayed")
    assert_same(train(model, call), train(plain, plain))
    assert seen.counts()["0.up", "input"] == seen.counts()["0.down", "weight"] == 3


def test_a_copy_has_state_of_its_own():
    model = blocks("delayed")
    call, _ = compiled(model)
    train(model, call, steps=1)
    twin = copy.deepcopy(model)
    before = ng.scaling_state(model)
    train(twin, compiled(twin)[0], steps=2)
    assert_same(list(ng.scaling_state(model).values()), list(before.values()))
    assert ng.scaling_state(twin)["narrowgauge.0.up.steps"] == 3


def test_frozen_weights_and_inputs_without_grad():
    eager, model = blocks("rowwise"), blocks("rowwise")
    for each in (eager, model):
        each[0].up.weight.requires_grad_(False)
    call, _ = compiled(model)
    found = []
    for each in (eager, call):
        y = each(torch.randn(4, 128, generator=torch.Generator().manual_seed(2)))
        y.backward(torch.ones_like(y))
        found.append(y)
    assert torch.equal(*found)
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_what_does_not_fit_is_refused():
    call, _ = compiled(blocks("current"))
    with pytest.raises((RuntimeError, ShapeError), match=r"(?i)mat1|shape|size|fit"):
        call(torch.randn(4, 64))
