"""torchao's float8 on two ranks, as $KIND says: weights that FSDP2 gathers in FP8, or layers that are cut."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import leave, pieces, place
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

kind, device = os.environ["KIND"], place()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = torch.distributed.init_device_mesh(device.type, (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128)).to(device)
gathered = kind.startswith("gathered")
config = Float8LinearConfig(emulate=device.type == "cpu", enable_fsdp_float8_all_gather=gathered)
convert_to_float8_training(model, config=config)
if gathered:
    for layer in (model[1], model[3], model):
        fully_shard(layer, mesh=mesh)
else:
    column, row = (
        (ColwiseParallel, RowwiseParallel) if kind == "cut" else (Float8ColwiseParallel, Float8RowwiseParallel)
    )
    parallelize_module(model, mesh, {"1": column(), "3": row()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
said = []
mine = slice(dist.get_rank(), None, 2) if gathered else slice(None)
for tokens in pieces(count=24)[mine].to(device).split(4):
    loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if kind == "gathered, scales before":
        precompute_float8_dynamic_scale_for_fsdp(model)
    said.append(loss.item())
if dist.get_rank() == 0:
    Path("said.json").write_text(json.dumps(said))
leave()
