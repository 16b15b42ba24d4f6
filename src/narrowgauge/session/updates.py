"""From a loss to new weights: what `backward` is called on, and what optimizers are about to do with the gradients.

scale(loss)          a gradient scaler's loss is known before it was scaled
backward(loss)       one microbatch
clip_grad_norm_      the program's own norm, from before clipping
optimizer.step       learning rate, gradient norm; the step is made
scaler.step          made, or skipped
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from narrowgauge.session.same_weights import SameWeightsProbe
from narrowgauge.session.seams import in_backward
from narrowgauge.session.steps import Steps


class Updates:
    """Follows the backward passes and optimizers of one program."""

    def __init__(self, steps: Steps, probe: SameWeightsProbe | None) -> None:
        self._steps, self._probe = steps, probe
        self._clip_norm: Tensor | None = None
        self._scaled: tuple[Tensor, Tensor, Any] | None = None
        self.backwards = 0
        self.skipped = 0

    def loss_scaled(self, scaler: Any, before: Any, after: Any) -> None:
        """A gradient scaler multiplied the loss."""
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            self._scaled = (after, before, scaler)

    def backward_begins(self, loss: Any, plain: bool) -> None:
        """`backward` is called on `loss`."""
        self.backwards += 1
        self._steps.enter()
        line = self._steps.line
        seen = loss[0] if isinstance(loss, tuple | list) and len(loss) == 1 else loss
        if self._scaled is not None and self._scaled[0] is seen and line is not None:
            scale = getattr(self._scaled[2], "_scale", None)
            if isinstance(scale, Tensor):
                line.scalars["loss_scale"] = scale.detach().clone()
            seen = self._scaled[1]
        if isinstance(seen, Tensor) and seen.numel() == 1:
            self._steps.ledger.add_loss(seen)
        if self._probe is not None:
            self._probe.before_backward(loss, plain)

    def backward_ended(self, loss: Any) -> None:
        """The gradients of one microbatch are there; the weights have not moved."""
        self._scaled = None
        line = self._steps.line
        if self._probe is None or line is None or not self._probe.armed(line.step):
            return
        began = time.perf_counter()
        self._steps.memory.sample()
        self._probe.after_backward(loss)
        self._steps.memory.forget()
        line.away += time.perf_counter() - began
        line.disturbed = True

    def gradients_clipped(self, norm: Tensor) -> None:
        """The program clipped; its own norm is the one before clipping."""
        self._clip_norm = norm.detach() if isinstance(norm, Tensor) else None

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        line = self._steps.line
        if line is None or in_backward():
            return
        if "lr" not in line.scalars and optimizer.param_groups:
            lr = optimizer.param_groups[0].get("lr")
            if lr is not None:
                line.scalars["lr"] = lr.detach() if isinstance(lr, Tensor) else float(lr)
        if "grad_norm" not in line.scalars:
            norm = self._clip_norm if self._clip_norm is not None else _grad_norm(optimizer)
            if norm is not None:
                line.scalars["grad_norm"] = norm

    def step_ended(self, optimizer: Optimizer) -> None:
        """An optimizer stepped."""
        self._clip_norm = None
        self._steps.end()

    def scaler_stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        """A gradient scaler's step returned; if the optimizer did not move, it skipped."""
        if self._steps.made or self._steps.line is None:
            return
        self._steps.line.scalars["skipped"] = 1.0
        self.skipped += 1
        self.step_ended(optimizer)


def _grad_norm(optimizer: Optimizer) -> Tensor | None:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    dense = [g.detach() for g in grads if g.layout is torch.strided]
    if not dense:
        return None
    norms = torch._foreach_norm(dense)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float32) for n in norms]))
    return norm
