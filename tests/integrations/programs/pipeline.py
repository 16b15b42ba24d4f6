"""torch's pipeline: two stages of a model on two ranks, one forward and one backward at a time, four microbatches."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import leave, pieces, place
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Model(nn.Module):
    """The whole model, of which a stage keeps its part."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 32), nn.Linear(32, 128)
        self.layers = nn.ModuleDict()
        for i in range(4):
            self.layers[str(i)] = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return x if self.head is None else self.head(x)


def loss_of(logits, tokens):
    return F.cross_entropy(logits.reshape(-1, 128), tokens.reshape(-1))


device = place()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Model()
if rank == 0:
    model.head = None
else:
    model.embed = None
for others in ("23", "01")[rank]:
    del model.layers[others]
stage = PipelineStage(model.to(device), rank, 2, device)
schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
losses, said = {}, []
for step, tokens in enumerate(pieces(length=33, count=32).to(device).split(8), 1):
    rate, loss = scheduler.get_last_lr()[0], torch.zeros((), device=device)
    if rank == 0:
        schedule.step(tokens[:, :-1].contiguous())  # torch 2.11 compares strides
    else:
        each = []
        schedule.step(target=tokens[:, 1:], losses=each)
        loss = torch.stack(each).mean()
    square = nn.utils.get_total_norm([p.grad for p in model.parameters()]) ** 2
    dist.all_reduce(square)
    norm = square.sqrt()  # of both stages
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    dist.broadcast(loss, 1)
    losses[step] = loss.item()
    said.append({"loss": losses[step], "learning_rate": rate, "grad_norm": norm.item()})
if rank == 0:
    Path("said.json").write_text(json.dumps(said))
leave()
