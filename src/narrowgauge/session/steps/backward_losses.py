"""What `backward` is called on: the loss of a microbatch, as the program had it before a gradient scaler multiplied it.

loss * scale, or each of several by it      its loss is the one before, if backward is called on the product
backward([a, b])                            sums the gradients of both: its loss is a + b
backward(y, gradients)                      y is no number: no loss
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowgauge.session.steps.steps import Steps


class BackwardLosses:
    """Those of one program; they go into the open step's line."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._scaled: dict[int, tuple[Tensor, Tensor, float | Tensor | None]] = {}  # what a loss became, by its id
        self.numbers = self._vectors = 0  # microbatches with a loss, and without

    def multiplied(self, before: Any, after: Any, scale: Any) -> None:
        """A loss became another by a scale, or each of several."""
        if isinstance(before, tuple | list) and isinstance(after, tuple | list):
            for one, scaled in zip(before, after, strict=False):
                self.multiplied(one, scaled, scale)
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            self._scaled[id(after)] = after, before, scale.detach().clone() if isinstance(scale, Tensor) else scale

    def forget(self) -> None:
        """What was multiplied has had its backward."""
        self._scaled = {}

    def add(self, loss: Any, *, staged: bool) -> None:
        """A microbatch has this loss, or several; if `staged`, what is no number is the gradient of a later stage."""
        if type(loss) is Tensor and not self._scaled and loss.numel() == 1:  # as it mostly is
            self.numbers += 1
            self._steps.ledger.add_microbatch(loss)
            return
        losses = [self._unscaled(each) for each in (loss if isinstance(loss, tuple | list) else (loss,))]
        tensors = [each for each in losses if isinstance(each, Tensor)]
        if tensors and len(tensors) == len(losses) and all(each.numel() == 1 for each in tensors):
            self.numbers += 1
            first, *others = tensors
            if others:
                first = first.detach().float().reshape(())
            for other in others:
                first = first + other.detach().to(first).reshape(())
            self._steps.ledger.add_microbatch(first)
        elif tensors and not staged:
            self._vectors += 1
            self._steps.ledger.add_microbatch(None)

    def notes(self, backwards: int) -> list[str]:
        """Of how many of all backward passes there is none, if there is of others."""
        if not self.numbers or not self._vectors:
            return []
        return [
            f"Backward was called {self._vectors} of {backwards} times on something else than numbers, which "
            "has no loss: the losses of these steps lack it."
        ]

    @staticmethod
    def estimate(loss: Any) -> bool:
        """Whether it has no number, and so nothing is trained by it: it is on the meta device."""
        if type(loss) is Tensor:
            return loss.is_meta
        losses = loss if isinstance(loss, tuple | list) else (loss,)
        return any(isinstance(each, Tensor) and each.is_meta for each in losses)

    def _unscaled(self, loss: Any) -> Any:
        after, before, scale = self._scaled.get(id(loss), (None, None, None))
        if after is not loss:
            return loss
        if scale is not None and self._steps.line is not None:
            self._steps.line.scalars["loss_scale"] = scale
        return before
