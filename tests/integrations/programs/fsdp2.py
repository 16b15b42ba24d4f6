"""torchrun and FSDP2: every layer sharded over two ranks."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import pieces, place
from torch import nn
from torch.distributed.fsdp import fully_shard

device = place()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)
mesh = torch.distributed.init_device_mesh(device.type, (2,))
model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128)).to(device)
for layer in (model[1], model[3], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
said = []
for tokens in pieces(count=24)[dist.get_rank() :: 2].to(device).split(4):
    loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    said.append(loss.item())
if dist.get_rank() == 0:
    Path("said.json").write_text(json.dumps(said))
dist.destroy_process_group()
