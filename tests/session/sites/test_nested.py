"""Layers of nested tensors: their pieces are the rows."""

import pytest
import torch
from tests.session.sites.recorded import recorded, same
from torch import nn
from torch.nn import functional as F

from narrowgauge.session.sites.matrices import pieces

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_all_pieces_are_one_matrix(layout):
    torch.manual_seed(0)
    model = nn.Linear(16, 32)
    pieces = [torch.randn(n, 16) * n for n in (3, 5)]

    def step():
        x = torch.nested.nested_tensor(pieces, layout=layout)
        y = model(x)
        y.values().backward(torch.cat(pieces).repeat(1, 2).reshape(y.values().shape))

    rows, notes = recorded(model, step)
    assert notes == ""
    same(rows, "", [torch.cat(pieces)], "input")
    same(rows, "", [model.weight], "weight")
    same(rows, "", [torch.cat(pieces).repeat(1, 2)], "grad_output")


def test_pieces_that_are_no_matrix_are_not_taken_for_one():
    held = torch.randn(2, 8, 16)
    loose = torch.nested.narrow(held, 1, torch.tensor([0, 2]), torch.tensor([3, 5]), layout=torch.jagged)
    assert pieces(loose) is None  # what lies between its pieces is none of it
    assert pieces(torch.nested.nested_tensor([*held], layout=torch.jagged).transpose(1, 2)) is None
    assert pieces(torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(3, 5)])) is None


def test_what_cannot_be_taken_is_told():
    model = nn.Linear(16, 32).double()
    nested = torch.nested.nested_tensor([torch.ones(3, 16).double()], layout=torch.strided)
    rows, notes = recorded(model, lambda: model(nested))
    assert rows == {}
    assert "no quantizer takes them: input nested Tensor of float64, weight Tensor of float64." in notes


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_they_may_be_multiplied_by_a_piece_of_a_weight(layout):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 32, bias=False)

        def forward(self, x):
            return F.linear(x, self.head.weight[:16])

    torch.manual_seed(1)
    model, pieces = Half(), [torch.randn(n, 16) for n in (3, 5)]
    rows, notes = recorded(model, lambda: model(torch.nested.nested_tensor(pieces, layout=layout)))
    assert "failed" not in notes
    same(rows, "head", [torch.cat(pieces)], "input")
    same(rows, "head", model.head.weight, "weight")
