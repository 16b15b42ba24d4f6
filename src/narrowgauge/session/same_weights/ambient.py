"""What a computation depends on without being given it: random states, autocast, gradient mode.

Captured before a recorded call, set again before the call is replayed, and put back as the program had it afterwards.
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Modes:
    """Autocast (per device type: enabled, dtype), its cache, and whether gradients are recorded."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    grad: bool

    @classmethod
    def now(cls) -> Modes:
        """The modes that are in force."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return cls(autocast, torch.is_autocast_cache_enabled(), torch.is_grad_enabled())

    def enter(self) -> ExitStack:
        """Put them in force until the returned stack is closed."""
        stack = ExitStack()
        for kind, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        return stack


@dataclass(frozen=True)
class Rng:
    """The states of torch's generators and, when `whole`, of Python's and numpy's."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls, *, whole: bool = True) -> Rng:
        """The states as they are; no device is waited for."""
        cuda: tuple[Tensor, ...] = ()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            cuda = tuple(g.get_state() for g in torch.cuda.default_generators)
        if not whole:
            return cls(torch.default_generator.get_state(), cuda)
        numpy = sys.modules.get("numpy.random")
        return cls(
            torch.default_generator.get_state(),
            cuda,
            random.getstate(),
            numpy.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Set all states back to these."""
        torch.default_generator.set_state(self.cpu)
        for generator, state in zip(torch.cuda.default_generators if self.cuda else (), self.cuda, strict=False):
            generator.set_state(state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def same(self, other: Rng) -> bool:
        """Whether torch's generators stand where `other` says."""
        pairs = zip((self.cpu, *self.cuda), (other.cpu, *other.cuda), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)
