"""The noise twin's band holds a harmless change of a rounding's size; benchmarks/noise_twin.py has longer trainings."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge.observe.verdict.gap import Series, noise_band, paired_gap
from narrowgauge.session.compare import NOISE
from narrowgauge.session.models.perturb import perturb

STEPS, PAIRS = 120, 16


def losses(seed, noise=0.0, draw=0):
    """Of a classifier that learns what another one says."""
    torch.manual_seed(seed)
    model, teacher = (nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)) for _ in range(2))
    for p in teacher.parameters():
        p.data *= 3
    perturb(model, noise, draw)
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(STEPS):
        x = torch.randn(16, 16)
        loss = F.cross_entropy(model(x), (teacher(x) + 0.3 * torch.randn(16, 10)).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return Series(np.arange(STEPS), np.array(found))


@pytest.fixture(scope="module")
def trained():
    """Per seed the baseline, and one that was moved by a rounding's size."""
    return [(losses(seed), losses(seed, 1e-2, 500)) for seed in range(PAIRS)]


@pytest.mark.parametrize(("noise", "fewest", "most"), [(NOISE, 0, 3), (1e-6, 9, PAIRS)])
def test_a_harmless_change_seldom_leaves_the_band_but_of_a_twin_that_has_not_come_apart(trained, noise, fewest, most):
    bands = [noise_band(losses(seed, noise, 900), base) for seed, (base, _) in enumerate(trained)]
    left = [abs(paired_gap(other, base).pct) > band for (base, other), band in zip(trained, bands, strict=True)]
    assert fewest <= sum(left) <= most
