"""DeepSpeed's layer of experts: four, two on each rank, which sends the others' tokens to them."""

import json
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from text import place
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.moe = MoE(16, expert, num_experts=4, ep_size=2, capacity_factor=4.0)

    def forward(self, x):
        return self.moe(x)[0]


def name_in_whole(name):
    """What a rank's layer is called in the whole model."""
    before, found, after = name.partition("deepspeed_experts.")
    number, dot, rest = after.partition(".")
    return f"{before}{found}{int(number) + 2 * rank}{dot}{rest}" if found else name


device = place()
deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = Model().to(device)
model.moe.set_deepspeed_parallelism()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
said = []
for _ in range(2):
    x = torch.randn(2, 16, 16).to(device)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    said.append(loss.item())
if rank == 0:
    Path("said.json").write_text(json.dumps(said))
dist.destroy_process_group()
