"""FSDP1: its flat parameters, cut over ranks or not, and its own clip, beside the same model in one piece.

    cut      fully sharded
    whole    NO_SHARD: each rank has all of it, as under DDP
    mixed    a block of the first kind in a model of the second
    hybrid   cut over two ranks, and two others have the same

Each rank's gradients are those of the mean of all ranks' losses, so norms are computed by hand of all batches.
"""

import math

import pytest
import torch
from tests.session.ranks.pairs import started
from torch import nn

from narrowgauge.observe.store import open_run

PROGRAM = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
dist.init_process_group("gloo")
torch.manual_seed(0)
block = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
model = nn.Sequential(block, nn.Linear(32, 4))
inner, outer = (getattr(ShardingStrategy, name) for name in sys.argv[1].split("-"))
kept = {"device_id": torch.device("cpu"), "use_orig_params": sys.argv[1] != "NO_SHARD-NO_SHARD"}
if inner.name == "HYBRID_SHARD":
    kept["device_mesh"] = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
model[0] = FSDP(block, sharding_strategy=inner, **kept)
model = FSDP(model, sharding_strategy=outer, **kept)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(3):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
    model(x).square().mean().backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def whole(world):
    """Norms of gradients before the clip, of weights, and of what moved over what was there, step by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Linear(32, 4))
    for step in range(3):
        batches = [
            torch.randn(8, 16, generator=torch.Generator().manual_seed(9 * step + rank)) for rank in range(world)
        ]
        (sum(model(x).square().mean() for x in batches) / world).backward()
        grad, param = (math.sqrt(sum(x.double().square().sum().item() for x in of)) for of in (
            [p.grad for p in model.parameters()], list(model.parameters()),
        ))  # fmt: skip
        yield grad, param, 0.5 * min(grad, 0.1) / param
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * min(1.0, 0.1 / grad) * p.grad
                p.grad = None


@pytest.mark.parametrize(
    "kinds", ["FULL_SHARD-FULL_SHARD", "NO_SHARD-NO_SHARD", "FULL_SHARD-NO_SHARD", "HYBRID_SHARD-HYBRID_SHARD"]
)
def test_norms_are_those_of_the_whole_and_from_before_the_clip(warm_python, tmp_path, kinds, free_port):
    world = 4 if "HYBRID" in kinds else 2
    ranks = started(warm_python, tmp_path, free_port, PROGRAM, kinds, world=world)
    assert [rank.wait(120) for rank in ranks] == [0] * world
    run = open_run(tmp_path / "out")
    scalars = run.scalars(["grad_norm", "param_norm", "update_ratio"])
    found = list(zip(*(scalars[name].tolist() for name in ("grad_norm", "param_norm", "update_ratio")), strict=True))
    for seen, wanted in zip(found, whole(world), strict=True):
        assert seen == pytest.approx(wanted, rel=1e-4)
