"""Ways of getting from a model to a loss that a replay can follow, each against the same gap computed by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .programs import RoundedVariant, make_probe, watched


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class ModelOutput(dict):
    """Attributes and items at once, as in the best known library."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class WithLoss(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.body, self.kind = mlp(), kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.body(x)
        loss = F.cross_entropy(logits, labels)
        if self.kind is tuple:
            return loss, logits
        return self.kind(loss=loss, logits=logits)


class Stateful(nn.Module):
    """Keeps an auxiliary loss in an attribute, counts its calls, and remembers activations in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = mlp(0.3), nn.BatchNorm1d(16)
        self.calls, self.seen = 0, []
        self.cache = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.body(x)) * (1 + random.random() + np.random.rand())
        self.calls += 1
        self.seen.append(float(y.detach().sum()))
        self.cache += y.detach().sum(0)
        self.aux = y.square().mean()
        return y + self.cache


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.reentrant = nn.Linear(16, 16), mlp(0.2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)


@dataclass
class Case:
    """Modules, and a function from (modules, x, labels) to the loss that is given to backward."""

    modules: list[nn.Module]
    loss: Any


def _plain(m, x, y):
    logits = m[0](x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)) / 4


def _module_loss(m, x, y):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(m[0](x), y)


def _in_place(m, x, y):
    total = torch.zeros(())
    logits = m[0](x)
    logits[:, 0] *= 0.5
    logits[0].add_(1.0)
    total += F.cross_entropy(logits, y)
    total += 0.1 * logits.square().mean()
    return total


def _assigned(m, x, y):
    logits = m[0](x)
    losses = torch.zeros(2)
    losses[0] = F.cross_entropy(logits, y)
    logits[:, 1] = 0.25 * logits[:, 2]
    losses[1] = logits.square().mean()
    return losses.sum()


def _list(m, x, y):
    losses = [F.cross_entropy(m[0](part), target) for part, target in zip(x.chunk(2), y.chunk(2), strict=True)]
    return sum(losses) / len(losses)


def _item(m, x, y):
    logits = m[0](x)
    scale = logits.abs().mean().item()
    loss = F.cross_entropy(logits, y)
    loss.item(), float(loss.detach()), loss.detach().cpu()
    return loss * scale


def _encoder_decoder(m, x, y):
    hidden = m[0](x)
    pooled = {"hidden": torch.cat([hidden, hidden.flip(0)], 1)[:, :16], "flag": True}
    return F.cross_entropy(m[1](pooled["hidden"]), y)


def _siamese(m, x, y):
    a, b = m[0](x), m[0](x.flip(1))
    return (1 - F.cosine_similarity(a, b)).mean() + F.cross_entropy(a, y)


def _autocast_around(m, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        a = m[0](x)
        b = m[0](x * 2)
        return F.cross_entropy(a + b, y)


def _autocast_inside(m, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        logits = m[0](x)
    return F.cross_entropy(logits.float(), y)


def _custom_function(m, x, y):
    return Double.apply(F.cross_entropy(m[0](x), y))


def _stateful(m, x, y):
    logits = m[0](x)
    return F.cross_entropy(logits, y) + 0.1 * m[0].aux


def _noisy_loss(m, x, y):
    logits = m[0](x)
    return F.cross_entropy(F.dropout(logits + torch.randn_like(logits), 0.2), y)


def _own_weights(m, x, y):
    loss = F.cross_entropy(m[0](x), y)
    return loss + 1e-3 * sum(p.square().sum() for p in m[0].parameters())


def _frozen_teacher(m, x, y):
    teacher = nn.Linear(16, 16)
    with torch.no_grad():
        target = teacher(x).softmax(-1)
    return F.kl_div(m[0](x).log_softmax(-1), target, reduction="batchmean")


def _masked(m, x, y):
    logits = m[0](x)
    mask = torch.arange(len(x)) % 3 != 0
    losses = F.cross_entropy(logits, y, reduction="none")
    return (losses * mask).sum() / mask.sum()


def _default_device(m, x, y):
    with torch.device("cpu"):
        logits = m[0](x)
    with torch.device("cpu"):
        return F.cross_entropy(logits + torch.zeros(16), y)


CASES = {
    "loss outside": lambda: Case([mlp(0.1)], _plain),
    "loss module": lambda: Case([mlp()], _module_loss),
    "loss inside, dataclass": lambda: Case([WithLoss(Output)], lambda m, x, y: m[0](x, labels=y).loss),
    "loss inside, mapping": lambda: Case([WithLoss(ModelOutput)], lambda m, x, y: m[0](x, labels=y)["loss"] / 2),
    "loss inside, dict": lambda: Case([WithLoss(dict)], lambda m, x, y: m[0](x=x, labels=y)["loss"]),
    "loss inside, tuple": lambda: Case([WithLoss(tuple)], lambda m, x, y: m[0](x, y)[0]),
    "in place": lambda: Case([mlp()], _in_place),
    "assigned": lambda: Case([mlp()], _assigned),
    "several calls": lambda: Case([mlp(0.2)], _list),
    "item": lambda: Case([mlp()], _item),
    "encoder and decoder": lambda: Case([mlp(0.1), nn.Sequential(nn.Linear(16, 16))], _encoder_decoder),
    "siamese": lambda: Case([mlp(0.1)], _siamese),
    "autocast around": lambda: Case([mlp(0.1)], _autocast_around),
    "autocast inside": lambda: Case([mlp(0.1)], _autocast_inside),
    "custom function": lambda: Case([mlp()], _custom_function),
    "stateful": lambda: Case([Stateful()], _stateful),
    "noisy loss": lambda: Case([mlp(0.1)], _noisy_loss),
    "own weights": lambda: Case([mlp()], _own_weights),
    "frozen teacher": lambda: Case([mlp()], _frozen_teacher),
    "masked": lambda: Case([mlp()], _masked),
    "default device": lambda: Case([mlp()], _default_device),
    "checkpoint": lambda: Case([Checkpointed(False)], _plain),
    "reentrant checkpoint": lambda: Case([Checkpointed(True)], _plain),
}


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def gap_by_hand(case: Case, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """(gap %, cosine, norm ratio) from two runs of the same code on the same bits, the second one converted."""
    import copy

    seen = []
    for convert in (False, True):
        modules = copy.deepcopy(case.modules)
        variant = RoundedVariant(None, None)
        if convert:
            for m in modules:
                variant.put_on(m)
        seed()
        loss = case.loss(modules, x, y)
        loss.backward()
        grads = [p.grad.flatten() for m in modules for p in m.parameters() if p.grad is not None]
        seen.append((loss.item(), torch.cat(grads).double()))
    (a, grad_a), (b, grad_b) = seen
    cosine = torch.dot(grad_a, grad_b) / (grad_a.norm() * grad_b.norm())
    return 100 * (b - a) / abs(a), float(cosine), float(grad_b.norm() / grad_a.norm())


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    return torch.randn(12, 16), torch.randint(16, (12,))


@pytest.mark.parametrize("name", CASES)
def test_the_gap_is_the_one_computed_by_hand(name: str, batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(3)
    case = CASES[name]()
    want = gap_by_hand(case, *batch)
    probe = make_probe(steps=(1,))
    probe.armed(1)
    seed()
    with watched(probe, *case.modules):
        loss = case.loss(case.modules, *batch)
        loss.backward()
    assert probe.notes == []
    ((_, row),) = probe.results
    assert row.loss == pytest.approx(loss.item(), rel=1e-7)
    assert (row.loss_gap_pct, row.grad_cosine, row.grad_norm_ratio) == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert want[0] != 0.0
    assert probe.flops is not None
    assert probe.flops["total"] > 0
