"""A model converted by torchao's float8, its products emulated on a CPU."""

import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from text import pieces, place
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

device = place()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128)).to(device)
left_out = os.environ.get("LEFT_OUT", "3")
config = Float8LinearConfig(emulate=device.type == "cpu")
convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != left_out)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
said = []
for tokens in pieces(count=24).to(device).split(4):
    loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    said.append(loss.item())
Path("said.json").write_text(json.dumps(said))
