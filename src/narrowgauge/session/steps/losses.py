"""Finds evaluation losses: scalar losses that a program computes without gradients.

Two places, the outer one winning: what a model's call returns (a scalar, or an object or dict with a scalar `loss`),
and what torch's own loss functions return. All losses between two optimizer steps are one evaluation, of the weights
that the first of the two made; its value is their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.session.doors.hearing import capturing, unreal
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.tensors.sharded import here

LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


def scalar_loss(output: Any) -> Tensor | None:
    """The scalar loss that a model's output is or carries, if any."""
    if isinstance(output, dict):
        output = output.get("loss")
    elif not isinstance(output, Tensor | tuple | list) and hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, tuple | list):
        scalars = [x for x in output if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
        output = scalars[0] if len(scalars) == 1 else None
    if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point():
        return output
    return None


class EvalLosses:
    """Collects losses; `take()` gives the mean of each evaluation. `steps` says how many steps were made by now."""

    def __init__(self, steps: Callable[[], int] = lambda: 0) -> None:
        self._mine: Callable[[], bool] = lambda: True
        self._steps = steps
        self._losses: list[tuple[int, Tensor]] = []
        self._mark: int | None = None

    def watch(self, seams: Seams, mine: Callable[[], bool] = lambda: True) -> None:
        """Listen to torch's loss functions, where the calling thread is `mine`."""
        self._mine = mine
        for name in LOSSES:
            seams.replace(F, name, self._listen, overridable=True)
        seams.replace_where_held(F, LOSSES)

    def _listen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            loss = original(*args, **kwargs)
            if torch.compiler.is_compiling():  # a look from inside would break the graph
                return loss
            if not torch.is_grad_enabled() and not (inside_backward() or capturing() or unreal()) and self._mine():
                unseen_by_modes(self._add, loss)
            return loss

        return run

    def _add(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_meta:
            self._losses.append((self._steps(), here(loss).detach().reshape(()).float()))

    def model_begins(self) -> None:
        """A model's call without gradients begins; losses inside it are parts of what it may return."""
        self._mark = len(self._losses)

    def model_ended(self, output: Any) -> None:
        """The call ended with `output`."""
        loss = scalar_loss(output)
        if loss is not None and self._mark is not None:
            del self._losses[self._mark :]
            self._add(loss)
        self._mark = None

    def take(self) -> dict[int, Tensor]:
        """The mean of what was collected since the last call, by the number of steps that were made before."""
        found: dict[int, list[Tensor]] = {}
        for steps, loss in self._losses:
            found.setdefault(steps, []).append(loss)
        self._losses.clear()
        return {steps: torch.stack([x.to(x_s[-1].device) for x in x_s]).mean() for steps, x_s in found.items()}
