"""FSDP1's own clip, by the norm of all ranks' gradients: most of it never passes torch's `clip_grad_norm_`.

    model.clip_grad_norm_(1.0)     returns the norm from before, as of every rank's shards

Source: torch 2.13, torch/distributed/fsdp/fully_sharded_data_parallel.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from narrowgauge.session.doors.seams import Seams

PLACE = "torch.distributed.fsdp.fully_sharded_data_parallel"


class Hears(Protocol):
    """Who hears of clips."""

    def gradients_clipped(self, norm: Any, order: float, of: frozenset[int] | None = None) -> None:
        """The gradients `of` these parameters were clipped; `norm`, of that order, is theirs from before."""


def follow(seams: Seams, updates: Hears) -> bool:
    """Tell `updates` of such clips from now on; False if the program has not loaded FSDP1 yet."""
    kind = getattr(sys.modules.get(PLACE), "FullyShardedDataParallel", None)
    if kind is None:
        return False

    def clip(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            of = frozenset(id(p) for p in self.parameters() if p.grad is not None)
            norm = original(self, *args, **kwargs)
            updates.gradients_clipped(norm, float(kwargs.get("norm_type", args[1] if len(args) > 1 else 2.0)), of)
            return norm

        return run

    seams.replace(kind, "clip_grad_norm_", clip)
    return True
