"""Calls of known layers that have not returned, of each thread its own: products inside of them are theirs."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from narrowgauge.session.sites.layer import Layer


@dataclass(eq=False, slots=True)
class OpenCall:
    """One such call."""

    layer: Layer
    heard: bool = False  # a product inside of it was shown in its name


class Running(threading.local):
    """All of the calling thread's, the innermost last."""

    def __init__(self) -> None:
        self._calls: list[OpenCall] = []

    def begins(self, layer: Layer) -> None:
        """A layer is called."""
        self._calls.append(OpenCall(layer))

    def ended(self, layer: Layer) -> OpenCall | None:
        """Its call returned, and with it those inside, which had errors; None if nobody told of its beginning."""
        calls = self._calls
        at = len(calls) - 1
        while at >= 0 and calls[at].layer is not layer:
            at -= 1
        if at < 0:
            return None
        call = calls[at]
        del calls[at:]
        return call

    def forget(self) -> None:
        """None of them will return."""
        self._calls.clear()

    def innermost(self) -> OpenCall | None:
        """The last that began."""
        return self._calls[-1] if self._calls else None

    def tells(self) -> bool:
        """Whether a layer runs that tells of all that it multiplies."""
        for call in self._calls:  # noqa: SIM110 - a generator takes longer than all there are
            if call.layer.kind.whole:
                return True
        return False
