"""Convert a model to FP8 in place, train it, and turn it back."""

import torch
from torch import nn

import narrowgauge as ng


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # before or after converting, both work

model, report = ng.convert(model, ng.recipes.CURRENT, last=1)  # last block and output head stay high
print(report)

tokens = torch.randint(256, (8, 33))
for step in range(5):
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.6f}")

ng.revert(model)
print("and back:", model[1].up)
