"""Whose a backward pass is, where one model is watched beside others: a GAN's generator, say.

loss <- ... <- AccumulateGrad(p)     what `backward` is called on leads to the parameters that get a gradient
one of the watched model's           its own: the search ends, mostly within a few operations
others' alone                        another's: neither its loss nor its microbatch is the watched model's
a function of somebody's own         may lead to parameters that no graph shows, as a reentrant checkpoint's: its own

It is asked of each, and in steps that are left alone as well: what the optimizers were made with decides at once, and
only where nothing of that is reached is it asked what the model and the optimizers hold now. That is not kept: nobody
tells where a program exchanges a parameter of its model, or lays one into a group of its optimizer by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.tensors.masters import copies_of
from narrowgauge.session.tensors.of_modules import ids_of

_COMPILED = "CompiledFunctionBackward"  # which shows all parameters that it takes
_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class Others:
    """Those of one program.

    Args:
        only: the model to follow; without one, all that train, and there are no others.
        optimizers: those of the model that is watched.
        steps: how many it has made.

    Attributes:
        none: all that train are followed.
        train: some do.
        gone: steps that the model had made, when it was gone and others trained.
    """

    def __init__(self, only: nn.Module | None, optimizers: Trained, steps: Callable[[], int]) -> None:
        self._only = None if only is None else ref(only)
        self._optimizers, self._steps = optimizers, steps
        self.none, self.train = only is None, False
        self.gone: int | None = None

    def made(self, made_with: Sequence[Tensor]) -> bool:
        """An optimizer was made with these; whether it trains others alone."""
        if self._only is None:
            return False
        model = self._only()
        own = set() if model is None else ids_of(model)
        if any(id(p) in own for p in made_with) or (model is not None and copies_of(model, made_with)):
            return False
        self.train = True
        return True

    def learn_from(self, loss: Any) -> bool:
        """Whether gradients of `loss` reach others' parameters alone."""
        if self._only is None or not self.train:
            return False
        leaves = _leaves(loss, self._optimizers)
        if not leaves or self._own(leaves.keys()):
            return False
        for leaf in leaves.values():
            if type(leaf) is nn.Parameter or isinstance(leaf, nn.Parameter):
                if self.gone is None and self._only() is None:
                    self.gone = self._steps()
                return True
        return False

    def hold(self, these: frozenset[int]) -> bool:
        """Whether what has these ids is trained in others alone."""
        return self._only is not None and self.train and not self._own(these)

    def _own(self, these: Set[int]) -> bool:
        """Whether the one model that is watched, or an optimizer of it, holds any of these."""
        model = None if self._only is None else self._only()
        return self._optimizers.holds(these) or (model is not None and not these.isdisjoint(ids_of(model)))


def _leaves(loss: Any, optimizers: Trained) -> dict[int, Tensor]:
    """What gradients of `loss` reach, by ids; nothing where that is sure to be, or may be, what `optimizers` train."""
    waiting: list[Any] = []
    for each in loss if isinstance(loss, tuple | list) else (loss,):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            waiting.append(each.grad_fn)
    seen, found, made = set(waiting), {}, optimizers.made()
    while waiting:
        node = waiting.pop()  # the last first: a layer's weight, mostly
        if type(node) is _Leaf:
            leaf: Tensor = node.variable
            known = made.get(id(leaf))
            if known is not None and known() is leaf and not leaf.is_meta:
                return {}
            found[id(leaf)] = leaf
            continue
        if isinstance(node, BackwardCFunction) and type(node).__name__ != _COMPILED:
            return {}
        for more, _ in node.next_functions:
            if more is not None and more not in seen:
                seen.add(more)
                waiting.append(more)
    return found
