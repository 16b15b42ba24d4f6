"""Whether a program trains by the loss that its model's call returns, so that an evaluation's is of the same kind.

    whole      backward is called on it, or on what was made of it and numbers alone (loss / 4, scaler.scale(loss))
    in part    on something that it is a part of (a loss and a router's; or it was the router's)
    not        on something else (preference optimization, whose model returns the cross entropy of its labels)

Nodes of a graph have numbers that grow as a thread makes them: what lies between two has one between theirs. Where
several calls come before a backward, nothing is said: it may be of the sum of their losses.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from torch import Tensor

MOST_NODES = 512  # that are gone through in one backward pass
OFTEN = 16  # backward passes: these are all looked at, and then one in as many


class ReturnedLosses:
    """Asked in some of a program's backward passes, until one is of the whole."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, str, int] | None] = []  # that made what calls since the last backward returned
        self._passes = self._outside = self._parts = 0
        self._whole = False

    @property
    def asks(self) -> bool:
        """Whether it is still to be told of what is returned."""
        return not self._whole and (self._passes < OFTEN or self._passes % OFTEN == 0)

    @property
    def otherwise(self) -> bool:
        """Whether what was looked at so far is never the whole."""
        return not self._whole and self._parts + self._outside > 0

    def returned(self, loss: Tensor | None) -> None:
        """A model's call with gradients returned this loss, or none."""
        if len(self._nodes) < 2:
            self._nodes.append(None if loss is None or loss.grad_fn is None else _name(loss.grad_fn))

    def backward(self, losses: Any) -> None:
        """Backward is called on this, or these."""
        self._passes += 1
        if not self._nodes:
            return
        wanted, *others = self._nodes
        self._nodes = []
        given = losses if isinstance(losses, tuple | list) else (losses,)
        nodes = [each.grad_fn for each in given if isinstance(each, Tensor) and each.grad_fn is not None]
        if wanted is None or others or not nodes or len(nodes) != len(given):
            return
        whole = len(nodes) == 1
        for _ in range(MOST_NODES):
            if not nodes:
                self._outside += 1
                return
            node = nodes.pop()
            if _name(node) == wanted:
                self._parts += 1
                self._whole = whole
                return
            before = [each for each, _ in node.next_functions if each is not None]
            whole = whole and len(before) == 1
            nodes += [each for each in before if each._sequence_nr() >= wanted[0]]

    def note(self, evaluated: int, of: int) -> list[str]:
        """What `evaluated` of `of` losses of evaluations are that models' calls returned."""
        if not evaluated or not self.otherwise:
            return []
        told = f"{evaluated} of {of} losses of evaluations are what the model's call returned, "
        if self._parts:
            return [f"{told}which is only a part of what backward was called on: eval_loss has nothing of the rest."]
        return [
            f"{told}which backward was not called on, nor on anything made of it: eval_loss is no measure beside the "
            "training loss."
        ]


def _name(node: Any) -> tuple[int, str, int]:
    return node._sequence_nr(), node.name(), get_ident()
