"""Under torch.compile where it is easily forgotten: no tokens, checkpoints around it, copies, and what is refused."""

import copy
import gc
import io

import pytest
import torch
from tests.compute.nn.layers import Seen, assert_same, train_on
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.errors import ConversionError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Frames:
    """A compiler that keeps the names of the functions whose graphs it was given."""

    def __init__(self):
        self.targets = []

    def __call__(self, graph, inputs):
        self.targets += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return graph.forward


def layers(recipe):
    torch.manual_seed(0)
    return ng.convert(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), recipe=recipe)[0]


def compiled(function, **kwargs):
    return torch.compile(function, backend="aot_eager", **kwargs)


def train(model, call, batches=(8, 8, 8), dtype=torch.float32):
    return train_on(model, call, [(batch, 64) for batch in batches], dtype=dtype)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_a_batch_without_tokens(recipe, dynamic):
    eager, model = layers(recipe), layers(recipe)
    batches = (8, 0, 5, 0)
    assert_same(train(model, compiled(model, fullgraph=True, dynamic=dynamic), batches), train(eager, eager, batches))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_an_expert_whose_tokens_are_counted_by_the_data(recipe):
    eager, model = layers(recipe), layers(recipe)

    def routed(expert, x, mine):
        return expert(x[mine.nonzero().squeeze(1)])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(routed, fullgraph=True)
        for tokens in (5, 1, 0, 8):
            x, mine = torch.randn(8, 64, requires_grad=True), torch.arange(8) < tokens
            y = call(model, x, mine)
            y.sum().backward()
            assert torch.equal(y, routed(eager, x.detach(), mine))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_model_turned_to_float64(recipe):
    eager, model = layers(recipe).double(), layers(recipe).double()
    assert_same(
        train(model, compiled(model, fullgraph=True), dtype=torch.float64), train(eager, eager, dtype=torch.float64)
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_checkpoint_around_a_compiled_model(recipe, reentrant):
    """The scales of a layer whose first forward ran without grad come from the recomputed one; all is seen once."""
    eager, model, saw, seen = layers(recipe), layers(recipe), Seen(), Seen()
    set_observer(eager, saw)
    set_observer(model, seen)
    call = compiled(model)
    found = train(model, lambda x: checkpoint(call, x, use_reentrant=reentrant))
    assert_same(found, train(eager, lambda x: checkpoint(eager, x, use_reentrant=reentrant)))
    assert seen.counts() == saw.counts() == dict.fromkeys(seen.counts(), 3)
    assert len(seen.counts()) == 2 * 6
    for found in (saw, seen):
        checked = [role for (_, role), results in found.results.items() for _, check in results if check is not None]
        assert sorted(checked) == sorted(2 * ["grad_input", "grad_weight", "output"])


def test_a_forward_whose_backward_never_comes_is_forgotten_with_its_step():
    model = layers("delayed")
    call, state = compiled(model), model[0]._fp8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call(torch.randn(8, 64))
    call(torch.randn(8, 64)).sum().backward()
    assert state.waits
    optimizer.step()
    assert not state.waits
    call(torch.randn(8, 64)).sum().backward()
    assert not state.waits


def test_an_unpickled_model_follows_its_optimizer():
    eager, file = layers("delayed"), io.BytesIO()
    torch.save(eager, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    assert_same(train(model, compiled(model)), train(eager, eager))


def test_a_copied_layer_has_its_handle_where_its_weight_is():
    model = copy.deepcopy(layers("delayed").to("meta"))
    assert all(layer._fp8.handle.device.type == "meta" for layer in (model[0], model[2]))


@pytest.mark.parametrize("end", ["revert", "delete"])
def test_a_layer_that_is_gone_before_its_backward(end):
    model = layers("current")
    y = compiled(model)(torch.randn(8, 64))
    if end == "revert":
        ng.revert(model)
    else:
        del model
        torch._dynamo.reset()
        gc.collect()
    with pytest.raises(ConversionError, match=r"reverted or deleted between a forward pass and its backward\. Run the"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_where_a_compiler_gave_up_it_does_not_go_on_inside_of_a_layer(monkeypatch):
    # It runs such a frame as it is, where nothing says that anything is being compiled, and compiles what that calls.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    eager, model, frames = layers("delayed"), layers("delayed"), Frames()
    found = train(model, torch.compile(model, backend=frames))
    assert_same(found, train(eager, eager))
    assert not [target for target in frames.targets if "gelu" not in target]  # which is the user's own


@pytest.mark.parametrize("strict", [True, False])
def test_export_is_refused(strict):
    # Exported, a graph would hold the address of something that lives here.
    with pytest.raises(Exception, match=r"cannot be exported.*revert|ConversionError"):
        torch.export.export(layers("current"), (torch.randn(8, 64),), strict=strict)


@pytest.mark.parametrize("how", [compiled, lambda function: function], ids=["compiled", "eager"])
def test_transforms_of_functions_are_refused(how):
    model, x = layers("current"), torch.randn(8, 64)
    for transformed in (
        lambda x: torch.func.jvp(model, (x,), (x,))[1],
        lambda x: torch.func.grad(lambda x: model(x).sum())(x),
        lambda x: torch.func.vmap(model)(x),
    ):
        with pytest.raises(ConversionError, match=r"inside a transform of torch.func .*Use torch.autograd, or call"):
            how(transformed)(x)
