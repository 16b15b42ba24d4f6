"""Whose a backward pass is, where one model is watched beside others: a GAN's generator, say.

loss <- ... <- AccumulateGrad(p)     what `backward` is called on leads to the parameters that get a gradient
one of the watched model's           its own: the search ends, mostly within a few operations
others' alone                        another's: neither its loss nor its microbatch is the watched model's
a function of somebody's own         may lead to parameters that no graph shows, as a reentrant checkpoint's: its own
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

_COMPILED = "CompiledFunctionBackward"  # which shows all parameters that it takes


def is_of_others(loss: Any, own: Container[int]) -> bool:
    """Whether gradients of `loss` reach parameters, and none of those with these ids."""
    losses = loss if isinstance(loss, tuple | list) else (loss,)
    first: list[Any] = [each.grad_fn for each in losses if isinstance(each, Tensor) and each.grad_fn is not None]
    seen, waiting, reaches = set(first), deque(first), False
    while waiting:
        node = waiting.popleft()
        if isinstance(node, BackwardCFunction) and type(node).__name__ != _COMPILED:
            return False
        variable = getattr(node, "variable", None)  # AccumulateGrad's
        if variable is not None:
            if id(variable) in own:
                return False
            reaches |= isinstance(variable, nn.Parameter)
        for more, _ in node.next_functions:
            if more is not None and more not in seen:
                seen.add(more)
                waiting.append(more)
    return reaches
