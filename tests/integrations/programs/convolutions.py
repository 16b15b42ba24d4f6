"""A loop of one's own that classifies pictures by convolutions of every kind, in autocast to BF16, two losses a step.

LAYOUT is "channels_last" or nothing: how pictures and weights lie in memory.
"""

import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from text import pieces, place
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset


class Small(nn.Module):
    """Pictures [B, 3, 16, 16] to logits of eight classes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.down = nn.Conv2d(32, 32, (3, 5), stride=2, padding=(1, 2))
        self.grouped = nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=4)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.wraps = nn.Conv2d(32, 64, 3, padding=(1, 0), padding_mode="circular")
        self.up = nn.ConvTranspose2d(64, 16, 4, stride=2, padding=1, groups=2)
        self.rows = weight_norm(nn.Conv1d(16, 24, 3, padding="same"))
        self.cube = nn.Conv3d(4, 8, (3, 2, 3), stride=(2, 1, 1), groups=2)
        self.spread = nn.ConvTranspose1d(8, 12, 3, stride=2)
        self.head = nn.Linear(12, 8)

    def forward(self, x):
        x = F.relu_(self.down(self.stem(x)))
        x = F.gelu(self.norm(self.grouped(x)))
        x = self.up(F.gelu(self.wraps(self.depthwise(x))))
        x = F.gelu(self.rows(x.flatten(2)))  # [B, 24, pixels]
        x = self.cube(x.unflatten(1, (4, 6)).unflatten(3, (-1, 8)))
        x = self.spread(F.gelu(x.flatten(2)))
        return self.head(x.mean(2))


device = place()
layout = torch.channels_last if os.environ.get("LAYOUT") == "channels_last" else torch.contiguous_format
torch.manual_seed(0)
codes = pieces(length=3 * 16 * 16, count=24)
spaces = (codes == ord(" ")).sum(1)
pictures = TensorDataset((codes / 64 - 1).view(-1, 3, 16, 16), spaces.argsort().argsort() // 3)
model = Small().to(device)
for layer in model.modules():
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        layer.to(memory_format=layout)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
loader, said, total = DataLoader(pictures, batch_size=4, shuffle=True), [], 0.0
for _ in range(2):
    for number, (x, labels) in enumerate(loader, 1):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x.to(device, memory_format=layout))
            loss = F.cross_entropy(logits.float(), labels.to(device)) / 2
        loss.backward()
        total += loss.item()
        if number % 2:
            continue
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        said.append({"loss": total, "grad_norm": norm, "learning_rate": schedule.get_last_lr()[0]})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total = 0.0
Path("said.json").write_text(json.dumps(said))
