"""A step of as many optimizers as there are parameters: each of them takes as long as one alone."""

import pytest
import torch
from tests.session.inline import followed
from torch import nn

from narrowgauge.session.tensors.norms import Squares


@pytest.mark.parametrize("clips", [False, True])
def test_their_norm_is_added_up_once(monkeypatch, tmp_path, clips):
    added, of_all = [], Squares.of_all.__func__
    monkeypatch.setattr(
        Squares, "of_all", classmethod(lambda cls, parts: (added.append(len(parts)), of_all(cls, parts))[1])
    )
    torch.manual_seed(0)
    model, expected = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))), []
    with followed(tmp_path) as (_, writer):
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        for _ in range(3):
            model(torch.randn(8, 4)).square().sum().backward()
            expected.append(float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()))
            if clips:
                torch.nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    assert added == [18 if clips else 20] * 3
    assert list(writer.column("grad_norm").values()) == pytest.approx(expected, rel=1e-5)


def test_weights_that_two_of_them_step_count_once(tmp_path):
    """An encoder that actor and critic share: its weights before the step are held no more as the second one steps."""
    torch.manual_seed(0)
    encoder, actor, critic = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)
    expected = []
    with followed(tmp_path, every=1) as (_, writer):
        optimizers = [torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1) for head in (actor, critic)]
        weights = [p for part in (encoder, actor, critic) for p in part.parameters()]
        for _ in range(3):
            expected.append(float(torch.cat([p.detach().reshape(-1) for p in weights]).norm()))
            hidden = encoder(torch.randn(8, 8))
            (actor(hidden).square().mean() + critic(hidden).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert list(writer.column("param_norm").values()) == pytest.approx(expected, rel=1e-5)
    assert not writer.column("update_ratio")
