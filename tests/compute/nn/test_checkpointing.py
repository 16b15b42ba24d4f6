"""Activation checkpointing: recomputed forwards are bit-identical, write once, and are shown once."""

import pytest
import torch
from tests.compute.nn.layers import Seen, adopt_all
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED

RECIPES = [CURRENT, DELAYED.with_(history=4), DELAYED.with_(history=4, name="from one", initial="one"), BLOCKWISE]
CHECKPOINTS = ["none", "reentrant", "non-reentrant", "half reentrant", "reentrant in non-reentrant"]


class Net(nn.Module):
    """Two layers, of which the first is called twice, under one kind of checkpointing."""

    def __init__(self, kind, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.kind = kind
        self.table = adopt_all(self, recipe)

    def inner(self, x):
        return torch.tanh(self.shared(torch.tanh(self.shared(x))))

    def body(self, x):
        return self.other(self.inner(x))

    def forward(self, x):
        if self.kind == "none":
            return self.body(x)
        if self.kind == "half reentrant":  # the shared layer also runs outside of the checkpoint
            return self.other(checkpoint(self.shared, torch.tanh(self.shared(x)), use_reentrant=True).tanh())
        if self.kind == "reentrant in non-reentrant":
            return checkpoint(
                lambda t: self.other(checkpoint(self.inner, t, use_reentrant=True)), x, use_reentrant=False
            )
        return checkpoint(self.body, x, use_reentrant=self.kind == "reentrant")


def train(kind, recipe, observer=None, steps=3, micro=2):
    net = Net(kind, recipe)
    set_observer(net, observer)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            x = torch.randn(8, 32, generator=data).requires_grad_()
            loss = net(x).square().sum()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return net, losses


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("kind", CHECKPOINTS[1:])
def test_checkpointing_changes_no_bit_of_the_training(kind, recipe):
    # One step where a weight also has a gradient from elsewhere: the order in which torch adds them up differs.
    steps = 1 if kind == "half reentrant" else 3
    (plain, losses), (net, found) = train("none", recipe, steps=steps), train(kind, recipe, steps=steps)
    assert found == losses
    for a, b in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 * (steps == 1), atol=1e-5 * (steps == 1))
    for name in ("history", "scale", "amax_now"):
        assert torch.equal(getattr(plain.table, name), getattr(net.table, name)), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_first_tensors_scale_is_recomputed_too(reentrant):
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        table = adopt_all(net, DELAYED.with_(history=4))
        x = torch.randn(8, 32, requires_grad=True)
        y = checkpoint(net, x, use_reentrant=reentrant) if checkpointed else net(x)
        y.square().sum().backward()
        table.fold()
        results.append((y, x.grad, net[0].weight.grad, table.scale, table.amax_now))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def like_torchs(function, x):
    """A reentrant checkpoint of a library's own."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(context, dy):
            x = context.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                function(x).backward(dy)
            return x.grad

    return Function.apply(x)


KINDS = {
    "plain": lambda function, x: function(x),
    "reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "non-reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "like torch's": like_torchs,
}


@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_each_use_of_a_layer_is_recomputed_with_the_scale_of_its_first_forward(first, then):
    results = []
    for one, other in (("plain", "plain"), (first, then)):
        torch.manual_seed(0)
        layer = nn.Linear(32, 32)
        table = adopt_all(nn.Sequential(layer), DELAYED.with_(history=4))
        x = torch.randn(8, 32, requires_grad=True)
        with torch.no_grad():
            layer(100 * x)  # an evaluation leaves no scale
        y = KINDS[other](layer, 9 * KINDS[one](layer, x))
        y.square().sum().backward()
        table.fold()
        results.append((y, x.grad, layer.weight.grad, table.scale, table.amax_now))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_what_a_compiled_graph_runs_without_gradients_sets_no_scale():
    """Its forward pass is an autograd function's, as a checkpoint's is."""

    def call(layer, x):
        with torch.no_grad():
            teacher = layer(100 * x)
        return layer(x) - teacher

    scales = []
    for called in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        layer = nn.Linear(32, 32)
        table = adopt_all(nn.Sequential(layer), DELAYED.with_(history=4))
        called(layer, torch.randn(8, 32, requires_grad=True)).square().sum().backward()
        scales.append(table.scale)
    torch._dynamo.reset()
    assert torch.equal(*scales)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_every_tensor_is_shown_once(kind, recipe):
    seen = Seen()
    train(kind, recipe, seen, steps=2, micro=1)
    roles = ("grad_input", "grad_output", "grad_weight", "input", "output", "weight")
    assert seen.counts() == {
        **{("other", role): 2 for role in roles},
        **{("shared", role): 4 for role in roles},
    }


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_gemm_checks_hold_under_checkpointing(kind):
    seen = Seen()
    train(kind, BLOCKWISE, seen, steps=3, micro=1)
    for (name, _), results in seen.results.items():
        checks = [check for _, check in results if check is not None]
        assert len(checks) == (2 if name == "shared" else 1)  # one step in three, every call of it
        for check in checks:
            error = (check.got - check.want).square().sum() / check.want.square().sum()
            assert 0 < error < 3e-3  # quantization error, not another tensor


def test_an_abandoned_recomputation_leaves_no_trace():
    net = Net("none", DELAYED.with_(history=4))
    x = torch.randn(8, 32, requires_grad=True)

    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                net(torch.full((8, 32), 1000.0))  # a forward in a backward that nobody differentiates
            return dy

    Peek.apply(net(x)).sum().backward()
    net.table.fold()
    assert net.table.amax_now[0] < 10
