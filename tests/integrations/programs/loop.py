"""A loop of one's own, in batches of 512 tokens; with AMP in autocast to float16, its losses scaled, two to a step."""

import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from text import pieces, place
from torch import nn

amp, device = bool(os.environ.get("AMP")), place()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**26, backoff_factor=2.0**-10, growth_interval=2, enabled=amp)
losses, said = {}, []
for step, batch in enumerate(pieces(length=16, count=256).to(device).split(64), 1):
    losses[step], scale = 0.0, scaler.get_scale()
    for tokens in batch.split(32):
        with torch.autocast(device.type, torch.float16, enabled=amp):
            logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1)) / 2
        scaler.scale(loss).backward()
        losses[step] += loss.item()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    norm = norm.item() if norm.isfinite() else None
    said.append({"loss": losses[step], "grad_norm": norm, "learning_rate": 1e-2, "scale": scale})
Path("said.json").write_text(json.dumps(said))
