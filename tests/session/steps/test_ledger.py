"""A step's loss: numbers on the host add up as tensors in float32 do, bit by bit."""

import math

import pytest
import torch

from narrowgauge.session.steps.ledger import Ledger
from narrowgauge.session.steps.rows import StepRows


class Nobody:
    def add_scalars(self, step, **values):
        pass


def loss_of(losses, by=None):
    ledger = Ledger(StepRows(Nobody(), lambda: False, Nobody()))
    line = ledger.open()
    for loss in losses:
        ledger.add_microbatch(loss)
    if by is not None:
        ledger.divide(by)
    return line.loss


def test_microbatches_add_up_and_are_divided_as_tensors_are():
    torch.manual_seed(0)
    for _ in range(50):
        losses = list(torch.randn(4) * 10 ** torch.randint(-3, 4, (4,)))
        wanted = losses[0] + losses[1] + losses[2] + losses[3]
        assert loss_of(losses) == wanted.item()
        assert loss_of(losses, by=3) == (wanted / 3).item()
        assert loss_of(losses, by=0.1) == (wanted / 0.1).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_losses_of_other_types_add_up_in_float32(dtype):
    first, second = torch.tensor(0.1), torch.tensor([0.2], dtype=dtype)
    wanted = (first + second.float().reshape(())).item()
    assert float(loss_of([first, second])) == float(loss_of([second, first])) == wanted


def test_a_loss_that_is_changed_later_was_what_it_was():
    for dtype in (torch.float32, torch.float64):
        loss = torch.tensor(2.0, dtype=dtype)
        found = loss_of([loss, torch.tensor(1.0)])
        loss.zero_()
        assert float(found) == 3.0


def test_what_is_too_large_for_float32_is_infinite():
    huge = torch.tensor(3e38)
    assert loss_of([huge, huge]) == math.inf
