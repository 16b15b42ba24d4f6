"""The shorter way of a tensor that lies in memory as the one of its site before did: what was asked then is known.

Of a recorded step's time most is not counting but finding out, tensor by tensor, what is to be counted and how; and a
program shows the same ones in each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.recipes import Operand
from narrowgauge.observe.stats.collector import Again


class Known(NamedTuple):
    """What is known of a site.

    Args:
        operand: the rule that its tensors are judged by.
        own: whether that is the layer's own.
        again: counts the next one, by a given scale if it had one; False where it has to go the whole way.
    """

    operand: Operand
    own: bool
    again: Again

    @classmethod
    def of(cls, x: Tensor, operand: Operand, own: bool, counts: Again) -> Known:
        """A site whose tensor x, without gaps, was counted; `counts` takes others that lie as it does."""
        kind, shape, dtype, device = type(x), x.shape, x.dtype, x.device

        def again(x: Tensor, given: Given | None) -> bool:
            if type(x) is not kind or x.dtype is not dtype or x.layout is not torch.strided or x.is_nested:
                return False
            return x.shape == shape and x.device == device and x.is_contiguous() and counts(x, given)

        return cls(operand, own, again)

    def serves(self, operand: Operand, own: bool) -> bool:
        """Whether it is for what is judged so."""
        return self.operand is operand and self.own == own
