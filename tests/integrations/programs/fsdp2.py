"""torchrun and FSDP2: every layer sharded over two ranks.

hooks.json: how many forward hooks each linear layer has, between each forward and its backward.
If MIXED is "yes": in BF16, its layers recomputed, two losses to a step, of which the first reduces no gradients.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import leave, pieces, place
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


device, mixed = place(), os.environ.get("MIXED") == "yes"
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)
mesh = torch.distributed.init_device_mesh(device.type, (2,))
model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128)).to(device)
policy = MixedPrecisionPolicy()
if mixed:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = (Recomputed(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
    model = nn.Sequential(nn.Embedding(128, 32), *blocks, nn.Linear(32, 128)).to(device)
for layer in (*model[1:], model) if mixed else (model[1], model[3], model):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
said, hooks, microbatches = [], [], 2 if mixed else 1
for batch in pieces(count=24 * microbatches)[dist.get_rank() :: 2].to(device).split(4 * microbatches):
    total = 0.0
    for number, tokens in enumerate(batch.split(4), 1):
        model.set_requires_gradient_sync(number == microbatches)
        loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 128).float(), tokens[:, 1:].reshape(-1)) / microbatches
        hooks.append([len(layer._forward_hooks) for layer in model.modules() if isinstance(layer, nn.Linear)])
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    said.append(total)
if dist.get_rank() == 0:
    Path("said.json").write_text(json.dumps(said))
    Path("hooks.json").write_text(json.dumps(hooks))
leave()
