"""A backward pass that a library asks the engine for by a function of its own, told as one of torch's `backward`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from narrowgauge.session.doors.updating import HearsUpdatesAlone


class HearsBackward(Protocol):
    """Hears of backward passes."""

    @property
    def alone(self) -> HearsUpdatesAlone:
        """Who hears of them while seams rest."""

    def backward_begins(self, loss: Any, plain: bool) -> None:
        """A backward pass begins, of `loss` if that is a tensor of one number, or of several such."""

    def backward_ended(self, loss: Any) -> None:
        """It returned."""

    def backward_failed(self) -> None:
        """It raised."""


@contextmanager
def backward(updates: HearsBackward, loss: Any, *, plain: bool, alone: bool = False) -> Iterator[None]:
    """Inside, the pass runs; `plain` if nothing is asked for but gradients of leaves, `alone` while seams rest."""
    if alone and updates.alone.backward_begins(loss):
        try:
            yield
        except BaseException:
            updates.alone.backward_ended(failed=True)
            raise
        updates.alone.backward_ended()
        return
    updates.backward_begins(loss, plain)
    try:
        yield
    except BaseException:
        updates.backward_failed()
        raise
    updates.backward_ended(loss)
