"""Gradient norms of whole rows behind brief ones, of programs that clip where nothing is to be clipped."""

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import batch, made, nothing_is_compiled, run
from torch import nn

__all__ = ["nothing_is_compiled"]  # a fixture for each test here


@pytest.mark.parametrize("scalars", ["loss", "recorded"])
def test_what_was_clipped_before_a_closure_is_none_of_a_later_step_s_norm(tmp_path, scalars):
    """Those are the gradients of the step before: of whichever, they are of none that was made long ago."""
    norms = []

    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        norms.clear()
        for number in range(1, 25):

            def closure(number=number):
                optimizer.zero_grad()
                loss = F.mse_loss(model(batch(number)), batch(number))
                loss.backward()
                norms.append(sum(p.grad.square().sum() for p in model.parameters()).sqrt().item())
                return loss

            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            losses.append(optimizer.step(closure).item())

    _, _, writer = run(tmp_path, program, scalars)
    known = writer.column("grad_norm")
    for at in (10, 20):
        assert known[at] in (pytest.approx(norms[at - 1]), pytest.approx(norms[at - 2])), at
