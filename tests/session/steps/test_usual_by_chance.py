"""Programs made by chance, left alone between recorded steps: all is as if each of their steps had been looked at."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import Model, batch, compared, nothing_is_compiled
from torch.utils.data import DataLoader

__all__ = ["nothing_is_compiled"]  # a fixture for each test here


class Program:
    """One by chance: what it is like, and what it calls now and then between what it does in each step."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, losses):
        self.chance, self.losses = random.Random(self.seed), losses
        self.model, self.copy, self.teacher = Model(), Model(), Model().requires_grad_(False)
        kind = self.chance.choice([torch.optim.SGD, torch.optim.AdamW])
        optimizer, other = kind(self.model.parameters(), lr=0.01), torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = DataLoader([batch(number)[:4] for number in range(3)], batch_size=None)
        trained = DataLoader([batch(number) for number in range(60)], batch_size=None)
        self.batches = iter(trained) if self.chance.random() < 0.4 else None
        self.rate, self.parts = self.chance.choice([0.01, 0.03, 0.08]), self.chance.choice([1, 1, 2])
        closure = self.chance.random() < 0.15
        for _ in range(24):
            self.perhaps()
            stepping = other if self.chance.random() < self.rate / 6 else optimizer
            if closure:
                stepping.step(self.forward)
            else:
                self.forward()
                stepping.step()
            stepping.zero_grad()
            self.perhaps()

    def forward(self):
        for _ in range(self.parts):
            x = next(self.batches) if self.batches is not None else batch(self.chance.randrange(50))
            y = self.model(x)
            self.perhaps()
            loss = F.mse_loss(y, x)
            if self.chance.random() < self.rate:
                with torch.no_grad():
                    self.losses.append(F.l1_loss(y.detach(), x).item())
            loss.backward()
            self.losses.append(loss.item())
            self.perhaps()
        return loss

    def perhaps(self):
        """Nothing, as a rule."""
        if self.chance.random() < self.rate:
            ways = self.called, self.judged, self.by_hand, self.in_passes, self.unusual
            self.chance.choice(ways)(self.chance.choice([self.model, self.copy, self.teacher, self.model.up]))

    @torch.no_grad()
    def called(self, model):
        model(batch(1))

    @torch.no_grad()
    def judged(self, model):
        self.losses.append(model(batch(2)).square().mean().item())
        self.losses.append(F.mse_loss(self.model(batch(2)), batch(2)).item())

    @torch.no_grad()
    def by_hand(self, model):
        model.eval()
        self.losses += [model(x).square().mean().item() for x in self.loader]
        model.train()

    @torch.no_grad()
    def in_passes(self, model):
        model = self.copy if model is self.copy else self.model
        self.losses += [F.mse_loss(model(x), x).item() for x in self.loader]

    def unusual(self, model):
        model(batch(7))
        if model is self.teacher:
            self.model.zero_grad()
        with pytest.raises(RuntimeError):
            self.model(torch.ones(3, 5))


@pytest.mark.parametrize("seed", range(16))
def test_it_is_as_if_each_step_had_been_looked_at(tmp_path, seed):
    compared(tmp_path, Program(seed), turns=True, every=(8, 10, 24, 1000)[seed % 4])
