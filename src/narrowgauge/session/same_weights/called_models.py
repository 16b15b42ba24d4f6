"""The models that a script calls on the way to its loss, as they were before; what they leave beside an output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from narrowgauge.session.same_weights.frozen_model import ModelState, all_modules


class CalledModels:
    """The outermost modules of those that were called.

    Attributes:
        roots: the modules, of which none is part of another.
        before: the state that each, and what is now part of it, had when it was first called.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.before: list[ModelState] = []

    def add(self, module: nn.Module) -> None:
        """A call of this one begins."""
        if any(module is known for root in self.roots for known in root.modules()):
            return
        self.roots = [root for root in self.roots if all(root is not m for m in module.modules())]
        self.roots.append(module)
        self.before.append(ModelState([module], own=True))


def kept_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any, Tensor]]:
    """Tensors with gradients in attributes, for the script to pick up (an auxiliary loss): `part.name[key]`, or
    `part.name` where the key is None.
    """
    for part in all_modules([module]):
        for name, value in vars(part).items():
            found: list[tuple[Any, Any]]
            if isinstance(value, Tensor):
                found = [(None, value)]
            elif type(value) in (list, tuple):
                found = list(enumerate(value))
            elif type(value) is dict and name not in ("_parameters", "_buffers"):
                found = list(value.items())
            else:
                continue
            for key, item in found:
                if isinstance(item, Tensor) and item.grad_fn is not None:
                    yield part, name, key, item
