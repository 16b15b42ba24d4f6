"""Ranks that train copies of one model each by itself, and average them now and then: local SGD.

Nobody declares these copies, and in no recorded step they are the same. That they began so is known: their norms are
those of one model, the root mean square of the ranks', and that they are not the same any more is told. So it is where
an outer optimizer steps copies of the weights by how far the ranks have come (DiLoCo), which are of no model.
"""

import json

import numpy as np
import pytest
from tests.session.ranks.pairs import started

from narrowgauge.observe.store import open_run

PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
parts = sys.argv[1] == "parts"
torch.manual_seed(dist.get_rank() if parts else 0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
with torch.no_grad():
    model[0].weight.mul_(1 + 2 * dist.get_rank() * parts)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
kept = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
outer = torch.optim.SGD(kept, lr=0.7, momentum=0.9) if sys.argv[1] == "outer" else None
said = []
for step in range(1, 9):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    model(x).square().mean().backward()
    norms = [sum(x.double().square().sum().item() for x in of) for of in (
        [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()])]
    said.append(norms)
    optimizer.step()
    optimizer.zero_grad()
    if parts or step % 4:
        continue
    for p, old in zip(model.parameters(), kept):
        dist.all_reduce(p.data)
        p.data /= 2
        old.grad = old.data - p.data
    if outer is not None:
        norms[0] += sum(old.grad.double().square().sum().item() for old in kept)
        outer.step()
        for p, old in zip(model.parameters(), kept):
            p.data.copy_(old.data)
print(json.dumps(said), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("word", "ranks_add"), [("replicas", 0.5), ("outer", 0.5), ("parts", 1.0)])
def test_norms_are_those_of_one_model_where_ranks_began_with_it(warm_python, tmp_path, word, ranks_add, free_port):
    ranks = started(warm_python, tmp_path, free_port, PROGRAM, word, every=3)
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    squares = np.array([json.loads((tmp_path / f"said{rank}").read_text()) for rank in (0, 1)])  # [ranks, steps, 2]
    norms = np.sqrt(ranks_add * squares.sum(0))
    run = open_run(tmp_path / "out")
    scalars = run.scalars(["grad_norm", "param_norm"])
    recorded = [3, 6]
    assert scalars["grad_norm"].tolist() == pytest.approx(norms[:, 0].tolist(), rel=1e-5)
    found = dict(zip(scalars["step"].tolist(), scalars["param_norm"].tolist(), strict=True))
    assert [found[step] for step in recorded] == pytest.approx([norms[step - 1, 1] for step in recorded], rel=1e-5)
    told = run.events("replicas_disagree")
    sites = ["0:weight", "2:weight"] if word != "parts" else []
    assert sorted(zip(told["site"].tolist(), told["step"].tolist(), strict=True)) == [(site, 3) for site in sites]
