"""The shorter way of a tensor that lies in memory as the one of its site before did: what was asked then is known.

Of a recorded step's time most is not counting but finding out, tensor by tensor, what is to be counted and how; and a
program shows the same ones in each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.observe.stats.collector import Again
from narrowgauge.session.sites.part import Rule

CountedAgain = Callable[[Tensor, Rule], bool]  # counts one; False where it has to go the whole way


def counted_again(x: Tensor, rule: Rule, counts: Again) -> CountedAgain:
    """For the site of x, without gaps, that was counted by the rule; `counts` takes others that lie as it does.

    Operands are told apart as objects: a layer's own is never the recipe's.
    """
    operand, kind, shape, dtype, device = rule.operand, type(x), x.shape, x.dtype, x.device

    def again(x: Tensor, rule: Rule) -> bool:
        if rule.operand is not operand or type(x) is not kind or x.dtype is not dtype:
            return False
        if x.layout is not torch.strided or x.is_nested or x.shape != shape or x.device != device or x.is_neg():
            return False
        return x.is_contiguous() and counts(x, rule.given)

    return again
