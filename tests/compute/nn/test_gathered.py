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
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.square().sum().backward()
