"""torch's tensor parallelism: a block of attention and an MLP cut over two ranks, whose norms split the sequence."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import leave, pieces, place
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


device = place()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = torch.distributed.init_device_mesh(device.type, (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(128, 32), Block(), nn.LayerNorm(32), nn.Linear(32, 128, bias=False)).to(device)
columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
plan = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    **dict.fromkeys(("1.q", "1.k", "1.v", "1.up"), columns),
    **dict.fromkeys(("1.o", "1.down"), rows),
    **dict.fromkeys(("1.norm1", "1.norm2", "2"), SequenceParallel()),
    "3": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
said = []
for batch in pieces(length=33, count=24).to(device).split(6):
    total, rate = 0.0, scheduler.get_last_lr()[0]
    for tokens in batch.split(3):
        with loss_parallel():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / 2
            loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.8)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    said.append({"loss": total, "learning_rate": rate, "grad_norm": norm.full_tensor().item()})
if dist.get_rank() == 0:
    Path("said.json").write_text(json.dumps(said))
leave()
