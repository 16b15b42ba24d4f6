"""torchrun and DistributedDataParallel, nothing else."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import leave, pieces, place
from torch import nn
from torch.nn.parallel import DistributedDataParallel

device = place()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128)).to(device)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
said = []
for number, tokens in enumerate(pieces(count=48)[dist.get_rank() :: 2].to(device).split(4)):
    logits = wrapped(tokens)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1)) / 2
    if number % 2 == 0:
        with wrapped.no_sync():
            loss.backward()
        first = loss.item()
        continue
    loss.backward()
    said.append(first + loss.item())
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    Path("said.json").write_text(json.dumps(said))
leave()
