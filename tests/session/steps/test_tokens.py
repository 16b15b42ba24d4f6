"""Tokens of a step, where there are any to be found."""

import torch
from tests.session.inline import followed
from torch import nn


class Own(nn.Module):
    """Makes its batch itself, unless it is given one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x=None):
        return self.up(torch.ones(8, 16) if x is None else x)


def test_a_step_without_any_has_no_number_of_them(tmp_path):
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with followed(tmp_path) as (session, writer):
        session.optimizer_made(optimizer)
        for batch in ((), (), (torch.ones(4, 16),)):
            model(*batch).square().mean().backward()
            optimizer.step()
    assert len(writer.column("loss")) == 3
    assert writer.column("tokens") == {3: 4}
    assert list(writer.column("tokens_per_second")) == [3]
