"""The shortcut where the program puts functions of its own into torch's places, and takes them out again."""

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import batch, made, nothing_is_compiled, run

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

LAST = 24


@pytest.mark.parametrize(
    ("since", "until"), [*((at, until) for at in (2, 3) for until in (4, 5, 13)), (6, 10), (6, 15), (10, 13), (10, 99)]
)
def test_a_backward_of_the_program_s_own_that_is_taken_out_again_leaves_each_loss(tmp_path, since, until):
    """What it goes on with, and puts back, is what stood there as it came: the shortcut's, or the ordinary one."""

    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        found = torch.autograd.backward
        for number in range(1, LAST + 1):
            if number == since:
                before = torch.autograd.backward
                torch.autograd.backward = lambda *args, before=before, **kwargs: before(*args, **kwargs)
            if number == until:
                torch.autograd.backward = before
            loss = F.mse_loss(model(batch(number)), batch(number))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if until > LAST:
            torch.autograd.backward = found

    losses, _, writer = run(tmp_path, program, "loss")
    assert writer.column("loss") == dict(enumerate(losses, 1))
