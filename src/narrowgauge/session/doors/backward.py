"""A backward pass that a library asks the engine for by a function of its own, told as one of torch's `backward`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class HearsBackward(Protocol):
    """Hears of backward passes."""

    def backward_begins(self, loss: Any, plain: bool) -> None:
        """A backward pass begins, of `loss` if that is a tensor of one number, or of several such."""

    def backward_ended(self, loss: Any) -> None:
        """It returned."""

    def backward_failed(self) -> None:
        """It raised."""


@contextmanager
def backward(updates: HearsBackward, loss: Any, *, plain: bool) -> Iterator[None]:
    """Inside, the pass runs; `plain` if nothing is asked for but gradients of leaves."""
    updates.backward_begins(loss, plain)
    try:
        yield
    except BaseException:
        updates.backward_failed()
        raise
    updates.backward_ended(loss)
