"""A weight's codes, made once per optimizer step and reused by the step's later microbatches.

A stale copy would train on yesterday's weights without a sign, so what is kept is believed only while

    no optimizer anywhere has stepped since           fused optimizers do not count up a tensor's `_version`
    the weight has the same storage and `_version`    in-place changes by autograd's rules, swapped memory
    no checkpoint was loaded into the layer           `Module.load_state_dict`
    its bits have the same sum, on a CPU              `p.data.add_()`, as some write SAM

A weight that is gathered for each use (FSDP2) is not `lasting`: codes of it that stay would undo the sharding.

On a GPU, where a sum would have to be waited for, `p.data.copy_()` between two microbatches of one step is seen by none
of these. Nothing is kept where no optimizer steps (a training loop that updates weights by hand), before a step has
shown that it has several microbatches, without grad, or while a CUDA graph is captured, which would replay without
asking again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.scaling.clock import optimizer_steps
from narrowgauge.compute.nn.tracing.capture import capturing
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.quant import QTensor

_Mark = tuple[int, int, tuple[int, ...], int]  # address of the storage, of the data in it, strides, version


class Made(NamedTuple):
    """What quantizing gave: two copies, the amax [], that over what the scale assumed, who has counted already.

    `given` is the scale that was used, if it was not x's own.
    """

    plain: QTensor | None
    turned: QTensor | None
    amax: Tensor | None = None
    ratio: Tensor | None = None
    look: Any = None
    given: Given | None = None

    def inv_scale_used(self) -> Tensor:
        """A copy of the inv_scale [] that was given: the table's own changes with the next step.

        Beside a given scale that is no number it does not matter, for then the codes' scale is NaN.
        """
        assert self.given is not None  # the scale is not x's own
        return self.given.inv_scale.clone()


class KeptWeight:
    """The quantized copies of one layer's weight, while they are fresh."""

    def __init__(self) -> None:
        self._made: Made | None = None
        self._made_from: _Mark | None = None
        self._sum = math.nan
        self._storage: StorageWeakRef | None = None  # while it is known here, no other storage gets its address
        self.lasting = True
        self._step = -1
        self._asked = self._asked_before = 0

    def worth_keeping(self, w_NK: Tensor) -> bool:
        """Whether more microbatches of this step are to come, as far as the last step tells."""
        return self.lasting and self._asked < self._asked_before and not capturing(w_NK)

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
        if capturing(w_NK) or unseen_by_modes(_sum, w_NK) != self._sum:
            return None
        return self._made

    def keep(self, w_NK: Tensor, made: Made) -> None:
        """Keep both copies of a weight for the rest of the step."""
        self._made, self._made_from, self._sum = made, _mark(w_NK), unseen_by_modes(_sum, w_NK)
        self._storage = StorageWeakRef(w_NK.untyped_storage())

    def forget(self) -> None:
        """Let go of what is kept: the weight has changed."""
        self._made = self._made_from = self._storage = None


def _mark(w_NK: Tensor) -> _Mark:
    return w_NK.untyped_storage()._cdata, w_NK.data_ptr(), w_NK.stride(), w_NK._version


def _sum(w_NK: Tensor) -> float:
    """Of a weight's bits, on a CPU: a thirtieth of what quantizing takes. NaN, equal to nothing, where it is dear."""
    if w_NK.device.type != "cpu":
        return 0
    straight = w_NK if w_NK.is_contiguous() else w_NK.t()
    words = straight.shape[-1] * w_NK.element_size() % 8 == 0 and w_NK.data_ptr() % 8 == 0
    if not (words and straight.is_contiguous() and w_NK.storage_offset() * w_NK.element_size() % 8 == 0):
        return math.nan  # number by number it would take longer than quantizing anew
    return int(straight.view(torch.int64).sum())
