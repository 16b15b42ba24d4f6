"""A weight's codes, made once per optimizer step and reused by the step's later microbatches.

A stale copy would train on yesterday's weights without a sign, so what is kept is believed only while

    no optimizer anywhere has stepped since           fused optimizers do not count up a tensor's `_version`
    the weight has the same memory and `_version`     in-place changes by autograd's rules, swapped storage
    no checkpoint was loaded into the layer           `Module.load_state_dict`

`p.data.copy_()` between two microbatches of one step is seen by none of these. Nothing is kept where no optimizer steps
(a training loop that updates weights by hand), before a step has shown that it has several microbatches, without grad,
or while a CUDA graph is captured, which would replay without asking again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.nn.clock import optimizer_steps
from narrowgauge.compute.quant import QTensor

Made = tuple[QTensor | None, QTensor | None, Tensor | None]  # plain, turned, amax now over the amax assumed


class KeptWeight:
    """The quantized copies of one layer's weight, while they are fresh."""

    def __init__(self) -> None:
        self._made: Made | None = None
        self._made_from: tuple[int, int] | None = None
        self._amax: tuple[tuple[int, int], Tensor] | None = None
        self._step = -1
        self._asked = self._asked_before = 0

    def worth_keeping(self, w_NK: Tensor) -> bool:
        """Whether more microbatches of this step are to come, as far as the last step tells."""
        return self._asked < self._asked_before and not _capturing(w_NK)

    def begin(self) -> None:
        """Count a forward with grad; what an optimizer has outdated is let go."""
        if optimizer_steps() != self._step:
            self._step, self._asked_before, self._asked = optimizer_steps(), self._asked, 0
            self.forget()
        self._asked += 1

    def find(self, w_NK: Tensor) -> Made | None:
        """What was kept of this weight, None if there is nothing or it is no longer true."""
        if self._made is None or self._step != optimizer_steps() or self._made_from != _mark(w_NK):
            return None
        return None if _capturing(w_NK) else self._made

    def keep(self, w_NK: Tensor, made: Made) -> None:
        """Keep both copies of a weight for the rest of the step."""
        self._made, self._made_from = made, _mark(w_NK)

    def amax(self, w_NK: Tensor) -> Tensor | None:
        """The amax [] that was kept of this weight: the backward pass, which makes the other copy, need not ask again."""
        if self._amax is None or self._step != optimizer_steps() or self._amax[0] != _mark(w_NK) or _capturing(w_NK):
            return None
        return self._amax[1]

    def keep_amax(self, w_NK: Tensor, amax: Tensor) -> None:
        """Keep a weight's amax for the rest of the step."""
        self._amax = _mark(w_NK), amax

    def forget(self) -> None:
        """Let go of what is kept: the weight has changed."""
        self._made = self._made_from = self._amax = None


def _mark(w_NK: Tensor) -> tuple[int, int]:
    return w_NK.data_ptr(), w_NK._version


def _capturing(w_NK: Tensor) -> bool:
    return w_NK.is_cuda and torch.cuda.is_current_stream_capturing()
