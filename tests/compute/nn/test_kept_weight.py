"""A weight is quantized once per step, and a stale copy is never multiplied."""

import pytest
import torch
from tests.compute.nn.layers import Counting, adopt
from torch import nn

from narrowgauge.compute.nn.call import Call
from narrowgauge.compute.nn.operands import quantize_operand
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED, ROWWISE


class CountingCasts(Counting):
    """Counts the tensors of a weight's shape that are quantized."""

    def __init__(self):
        super().__init__()
        self.weights = 0

    def quantize_both(self, x_MK, *args, **kwargs):
        self.weights += tuple(x_MK.shape) == (48, 64)
        return super().quantize_both(x_MK, *args, **kwargs)


OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
}


def layer_and_backend(recipe, keeping=True):
    torch.manual_seed(0)
    backend = CountingCasts()
    layer = adopt(nn.Linear(64, 48), recipe, backend=backend)
    if not keeping:
        layer._fp8.kept_weight.worth_keeping = lambda weight: False
    return layer, backend


def microbatch(layer, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 64, generator=generator, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=generator))
    return [y.detach(), x.grad]


def train(layer, optimizer, steps=4, microbatches=3, between=lambda step: None):
    found = []
    for step in range(steps):
        for i in range(microbatches):
            found += microbatch(layer, 10 * step + i)
            between(10 * step + i)
        found += [p.grad.clone() for p in layer.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_same(found, want):
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, ROWWISE, BLOCKWISE], ids=lambda r: r.name)
def test_kept_codes_are_those_of_fresh_ones(recipe, make):
    (kept, counting), (fresh, always) = layer_and_backend(recipe), layer_and_backend(recipe, keeping=False)
    assert_same(train(kept, make(kept.parameters())), train(fresh, make(fresh.parameters())))
    assert always.weights == 4 * 3
    assert counting.weights == 3 + 3  # every microbatch of the first step, then once per step


def test_what_is_kept_is_nobody_elses_to_overwrite():
    """An operator's results belong to the graph that called it, which writes other things where they lay."""
    layer, _ = layer_and_backend(CURRENT)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    train(layer, optimizer, steps=1)
    state, weight = layer._fp8, layer.weight.detach()
    state.kept_weight.begin()
    call = Call.begin(state, torch.float32, "write")
    for _ in range(3):
        made = quantize_operand(call, "weight", weight, True, False)
        assert made.amax == weight.abs().max()
        made.amax.fill_(-1.0)


def test_the_guard_is_needed():
    """Believing a copy across an optimizer's step would show: fused AdamW leaves no mark on the weight."""
    layer, _ = layer_and_backend(CURRENT)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    train(layer, optimizer, steps=2)
    version = layer.weight._version
    kept = layer._fp8.kept_weight
    microbatch(layer, 0)
    stale = kept.find(layer.weight.detach())
    assert stale is not None
    optimizer.step()
    assert layer.weight._version == version
    assert kept.find(layer.weight.detach()) is None
    fresh, _ = layer_and_backend(CURRENT)
    fresh.load_state_dict(layer.state_dict())
    y, _ = microbatch(fresh, 1)
    kept._step += 1  # as if nobody had stepped
    kept.keep(layer.weight, stale)
    with torch.no_grad():
        assert torch.equal(layer(torch.ones(1, 64)), fresh(torch.ones(1, 64)))  # without grad nothing kept is used
    assert not torch.equal(microbatch(layer, 1)[0], y)


CHANGES = {
    "in place": lambda layer, new: layer.weight.detach().copy_(new),
    "behind autograd's back": lambda layer, new: layer.weight.data.copy_(new),
    "another memory": lambda layer, new: setattr(layer.weight, "data", new.clone()),
    "a checkpoint": lambda layer, new: layer.load_state_dict({"weight": new, "bias": layer.bias.detach()}),
    "an assigned checkpoint": lambda layer, new: layer.load_state_dict(
        {"weight": new.clone(), "bias": layer.bias.detach()}, assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_weight_changed_between_microbatches_is_quantized_anew(change):
    found = []
    for keeping in (True, False):
        layer, _ = layer_and_backend(CURRENT, keeping)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        train(layer, optimizer, steps=2)
        microbatch(layer, 100)
        with torch.no_grad():
            change(layer, torch.linspace(-1, 1, 48 * 64).reshape(48, 64))
        found.append(microbatch(layer, 101))
    assert_same(*found)


@pytest.mark.parametrize("lies", ["turned", "odd"])
def test_a_weight_that_lies_otherwise_and_was_changed_is_quantized_anew(lies):
    layer = adopt(nn.Linear(64, 48, bias=False), CURRENT)
    values = layer.weight.detach().clone()
    room = values.t().contiguous().t() if lies == "turned" else torch.cat([torch.zeros(1), values.flatten()])[1:]
    layer.weight = nn.Parameter(room.view(48, 64) if lies == "odd" else room)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    train(layer, optimizer, steps=2)
    before, _ = microbatch(layer, 100)
    assert torch.equal(microbatch(layer, 100)[0], before)
    layer.weight.data.mul_(torch.linspace(0.5, 2, 64))
    fresh = adopt(nn.Linear(64, 48, bias=False), CURRENT)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(microbatch(layer, 100)[0], microbatch(fresh, 100)[0])


def test_weights_updated_by_hand_are_never_kept():
    layer, backend = layer_and_backend(CURRENT)
    for step in range(4):
        microbatch(layer, step)
        layer.weight.data.sub_(0.1 * layer.weight.grad)
    assert backend.weights == 4


def test_another_weight_at_the_same_address_is_quantized_anew():
    """Weights given to `functional_call` come and go, and new ones get the memory and `_version` of those before."""
    found = []
    for keeping in (True, False):
        layer, _ = layer_and_backend(CURRENT, keeping)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x, outputs = torch.ones(4, 64), []
        for _ in range(3):
            for i in range(6):
                given = {name: (p * (1 + i)).detach().requires_grad_() for name, p in layer.named_parameters()}
                y = torch.func.functional_call(layer, given, (x,))
                y.sum().backward()
                outputs.append(y.detach())
                del given, y
            layer(x).sum().backward()
            optimizer.step()
        found.append(outputs)
    assert_same(*found)


def test_a_transposed_view_is_another_weight():
    layer = adopt(nn.Linear(64, 64, bias=False), CURRENT)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(8, 64)
    for _ in range(2):
        y = layer(x)
        turned = torch.func.functional_call(layer, {"weight": layer.weight.t()}, (x,))
        (y.sum() + turned.sum()).backward()
        optimizer.step()
        assert not torch.equal(y, turned)
