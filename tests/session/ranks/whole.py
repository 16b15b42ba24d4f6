"""A small model that two ranks train, and the same trained here by hand, in one piece."""

import pytest
import torch
from torch import nn

STEPS = 3
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def batch(step, who):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + who))
"""


def batch(step, who):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + who))


def by_hand(whose, microbatches=1, steps=STEPS):
    """The last step's tensors of a model in one piece, all batches stacked; the losses and gradient norms of all."""
    torch.manual_seed(1)
    up, down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
    optimizer = torch.optim.SGD([up.weight, down.weight], lr=0.5)
    losses, norms = [], []
    for step in range(steps):
        seen = {name: [] for name in ("up:input", "up:grad_output", "down:input", "down:grad_output")}
        weights = {"up:weight": up.weight.detach().clone(), "down:weight": down.weight.detach().clone()}
        losses.append([])
        batches = [x for who in range(whose) for x in batch(step, who).split(8 // microbatches)]
        for x in batches:
            h = up(x)
            h.retain_grad()
            r = torch.relu(h)
            y = down(r)
            y.retain_grad()
            loss = y.square().mean()
            loss.backward()
            losses[-1].append(loss.item())
            for name, tensor in zip(seen, (x, h.grad, r, y.grad), strict=True):
                seen[name].append(tensor.detach())
        for weight in (up.weight, down.weight):
            weight.grad /= len(batches)
        norms.append(torch.stack([up.weight.grad.norm(), down.weight.grad.norm()]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: torch.cat(tensors) for name, tensors in seen.items()} | weights, losses, norms


def rows(run, step, prefix):
    table = run.tensors(steps=[step])
    found = {
        site: {name: table[name][i] for name in ("rank", "ranks", "numel", "amax", "std")}
        for i, site in enumerate(table["site"].tolist())
    }
    return {site.removeprefix(prefix): row for site, row in found.items() if site.startswith(prefix)}


def check_whole(found, want):
    """The rows of two ranks, merged, are those of the tensors as a whole."""
    assert sorted(found) == sorted(want)
    for site, tensor in want.items():
        row = found[site]
        assert (row["rank"], row["ranks"], row["numel"]) == (0, 2, tensor.numel()), site
        assert row["amax"] == pytest.approx(tensor.abs().max().item(), rel=1e-4), site
        assert row["std"] == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-4), site
