"""A layer whose weight is whole only while it runs: the numbers of one whose weight stays, and what is saved of it."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import narrowgauge as ng
from narrowgauge.compute.nn.gathered import gathered_linear


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return ng.convert(nn.Sequential(nn.Linear(64, 32)), recipe="rowwise", backend="reference")[0][0]


def test_it_computes_what_the_layer_computes(layer):
    x, dy = torch.randn(2, 48, 64), torch.randn(2, 48, 32)
    found = []
    for call in (layer, lambda x: gathered_linear(x, layer.weight, layer.bias, layer._fp8)):
        mine = x.clone().requires_grad_()
        y = call(mine)
        y.backward(dy)
        found.append([y, mine.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_weight_saves_nothing_of_x(layer, frozen):
    layer.weight.requires_grad_(not frozen)
    saved = []
    with saved_tensors_hooks(lambda t: (saved.append(t.nbytes), t)[1], lambda t: t):
        y = gathered_linear(torch.randn(4096, 64, requires_grad=True), layer.weight, None, layer._fp8)
    assert (max(saved) < 4096 * 64) == frozen
    y.sum().backward()


def test_what_would_be_differentiated_twice_is_refused(layer):
    x = torch.randn(8, 64, requires_grad=True)
    y = gathered_linear(x, layer.weight, None, layer._fp8)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice a converted layer: .*\[convert\]"):
        dx.square().sum().backward()


class Partitioned:
    """As ZeRO 3 keeps a layer's weight: empty, and whole from the layer's beginning to its end, each way."""

    def __init__(self, layer):
        self.weight, self.whole = layer.weight, layer.weight.detach().clone()
        self.weight.ds_shape = self.whole.shape
        layer.register_forward_pre_hook(lambda *_: self.gather())
        layer.register_forward_hook(self.ran)
        self.free()

    def gather(self):
        self.weight.data = self.whole.clone()  # each time in memory of its own

    def free(self):
        self.weight.data = torch.empty(0)

    def ran(self, layer, args, y):
        self.free()
        y.register_hook(lambda dy: self.gather())


@pytest.mark.parametrize("high", [(), [{"gemms": ["dgrad"]}]])
@pytest.mark.parametrize("first", ["convert", "partition"])
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_a_weight_that_is_empty_between_its_uses(recipe, first, high):
    found = []
    for partitioned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32))
        if partitioned and first == "partition":
            Partitioned(model[0])
        ng.convert(model, recipe, backend="reference", high=high)
        if partitioned and first == "convert":
            Partitioned(model[0])
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        for _ in range(2):  # steps of two microbatches
            for i in range(2):
                x = torch.randn(48, 64, generator=torch.Generator().manual_seed(i)).requires_grad_()
                y = model(x)
                assert (model[0].weight.numel() == 0) == partitioned
                y.backward(torch.ones_like(y) * (1 + i))
                found.append([y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad])
                model.zero_grad()
            optimizer.step()
        if not high:  # microbatches share the codes of a weight that stays
            assert (model[0]._fp8.kept_weight._made is None) == partitioned
    for whole, part in zip(found[:4], found[4:], strict=True):
        for a, b in zip(whole, part, strict=True):
            assert torch.equal(a, b)
