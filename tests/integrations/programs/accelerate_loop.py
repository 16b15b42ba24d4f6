"""A loop of one's own on Accelerate, with accumulation and clipping. Samples take their time, and how long each step
waits for its batches is written down from outside."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from slow_data import Slow, write
from text import pieces, place
from torch import nn
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=place().type == "cpu")
model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
data = Slow(pieces(count=48), seconds=0.003 * (1 + accelerator.process_index))
loader = DataLoader(data, batch_size=4, shuffle=True)
wrapped, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
said, total = [], 0.0
batches = iter(loader)
for n in range(len(loader)):
    with data.waiting(first=n % 2 == 0):
        tokens = next(batches)
    with accelerator.accumulate(wrapped):
        logits = wrapped(tokens)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 128).float(), tokens[:, 1:].reshape(-1))
        accelerator.backward(loss)
        total += loss.item() / 2
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            said.append({"loss": total, "grad_norm": norm.item(), "learning_rate": schedule.get_last_lr()[0]})
            total = 0.0
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    Path("said.json").write_text(json.dumps(said))
write(data.waits, accelerator.process_index)
accelerator.end_training()
