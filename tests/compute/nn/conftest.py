"""A model small enough to train in a test, with everything that conversion has to leave alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self, dim=32, depth=3, vocab=48, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def train(model, optimizer, steps, start=0, micro=1, context=None):
    """Losses of some steps on data that depends on the step's number alone (two batches in turn)."""
    losses = []
    for step in range(start, start + steps):
        data = torch.Generator().manual_seed(1000 + step % 2)
        for _ in range(micro):
            tokens = torch.randint(48, (4, 9), generator=data)
            with context() if context else torch.enable_grad():
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def gpt():
    return Gpt


@pytest.fixture
def run_steps():
    return train
