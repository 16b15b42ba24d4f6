"""Whether a program trains a model by the loss that its call returns, so that an evaluation's is of the same kind.

    whole      backward is called on it, or on what was made of it and of nothing else that the call computed
               (loss / 4, scaler.scale(loss), loss + a penalty of the weights)
    in part    on something that it is a part of (a loss and a router's; or it was the router's)
    not        on something else (preference optimization, whose model returns the cross entropy of its labels)

Nodes of a graph have numbers that grow as a thread makes them: what lies between two has one between theirs, and what
the call computed has one below the next that is free when it returns. A parameter's is the largest that there is.
A compiled model's outputs have one node, and each its number there.

Several ranks, whose gradients are averaged, may multiply it by their number before backward, where it is their part of
a mean over all (Hugging Face's Trainer): an evaluation's is such a part, too.

Where several calls come before a backward, nothing is said: it may be of the sum of their losses. Nor where another
thread calls it. But a number that none of them returned, or that is a part of what it is called on, is not what the
program trains by (`apart`): a value, or the likelihood of an action, which are one number of one observation.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

MOST_NODES = 512  # that are gone through in one backward pass
OFTEN = 16  # backward passes: these are all looked at, and then one in as many


class _Made(NamedTuple):
    """Where a call's loss was made."""

    node: tuple[int, str]
    output: int
    until: int  # numbers of what the call made are below
    thread: int
    value: Tensor | None  # of one rank of several


class ReturnedLosses:
    """Those of one model; asked in some of its backward passes, until one is of the whole.

    Attributes:
        whole: whether one was.
        evaluated: how many losses of evaluations are what its calls returned.
    """

    def __init__(self) -> None:
        self._made: list[_Made | None] = []  # what calls since the last backward returned
        self._passes = self._outside = self._parts = self._apart = self.evaluated = 0
        self.whole = False
        self._ranks = 1
        self._factor: Tensor | None = None  # what backward is called on, unscaled, over it, where it is the whole

    @property
    def by_ranks(self) -> int:
        """The number of ranks, if the program multiplies it by that before backward; else 1."""
        return self._ranks if self._factor is not None and abs(float(self._factor) - self._ranks) < 1e-3 else 1

    @property
    def compared(self) -> bool:
        """Whether what the program made of it is known."""
        return self._factor is not None

    @property
    def asks(self) -> bool:
        """Whether it is still to be told of what is returned."""
        return not self.whole and (self._passes < OFTEN or self._passes % OFTEN == 0)

    @property
    def otherwise(self) -> bool:
        """Whether what was looked at so far is never the whole."""
        return not self.whole and self._parts + self._outside > 0

    @property
    def apart(self) -> bool:
        """Whether a number of such a call, which nothing says is a loss, is none that the program trains by."""
        return self.otherwise or (not self.whole and self._apart > 0)

    @property
    def partly(self) -> bool:
        """Whether it was a part of it."""
        return self._parts > 0

    def training_changed(self) -> None:
        """Other parameters are trained now, perhaps by another loss."""
        self._passes = 0

    def passed(self) -> None:
        """Backward is called, and nobody knows of what; other models were called as well."""
        self._passes += 1
        self._apart += bool(self._made) and not any(self._made)
        self._made = []

    def returned(self, loss: Tensor | None) -> None:
        """A model's call with gradients returned this loss, or none."""
        if len(self._made) < 2:
            node = None if loss is None else loss.grad_fn
            if loss is None or node is None:
                self._made.append(None)
                return
            # It may be multiplied where it is. Of what is spread over ranks a number would be a collective of theirs.
            value = loss.detach().clone() if type(loss) is Tensor and _ranks() > 1 else None
            self._made.append(_Made(name_of(node), loss.output_nr, _get_sequence_nr(), get_ident(), value))

    def backward(self, losses: Any, number: Tensor | None = None) -> None:
        """Backward is called on this, or these; `number`: what that is without a scaler's scale, if there is one."""
        self._passes += 1
        if not self._made:
            return
        wanted, *others = self._made
        self._made = []
        if wanted is None:
            self._apart += not any(others)
            return
        given = losses if isinstance(losses, tuple | list) else (losses,)
        edges = [(x.grad_fn, x.output_nr) for x in given if isinstance(x, Tensor) and x.grad_fn is not None]
        if not edges or len(edges) != len(given) or wanted.thread != get_ident():
            return
        found, alone = False, len(edges) == 1
        for _ in range(MOST_NODES):
            if not edges and others:
                self._apart += not (found and alone)
                return
            if not edges:
                self._outside += not found
                self._parts += found
                self.whole = found and alone
                if self.whole and wanted.value is not None and len(given) == 1:
                    self._compare(given[0] if number is None else number, wanted.value)
                return
            node, output = edges.pop()
            if name_of(node) == wanted.node and output == wanted.output:
                found = True
                continue
            before, least = node.next_functions, 0
            if node.name() == "BackwardHookFunctionBackward":  # a hook of the module's, set when the call had returned
                before = before[output : output + 1]
            elif node._sequence_nr() < wanted.until:
                alone, least = False, wanted.node[0]
            edges += [(each, at) for each, at in before if each is not None and each._sequence_nr() >= least]

    def _compare(self, loss: Tensor, returned: Tensor) -> None:
        if type(loss) is Tensor and loss.numel() == 1 and loss.device == returned.device:
            self._ranks, self._factor = _ranks(), loss.detach().reshape(()) / returned.reshape(())


def name_of(node: Any) -> tuple[int, str]:
    """What tells a node of a graph from the others that its thread made, and holds none of them."""
    return node._sequence_nr(), node.name()


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
