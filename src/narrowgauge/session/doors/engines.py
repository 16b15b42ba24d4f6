"""A step that an engine makes by a function of its own, told as such: of one, however optimizers step in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.doors.updating import Told


class HearsEngineSteps(Protocol):
    """Hears of an engine's steps."""

    def begins(self) -> bool:
        """One begins; whether its end is to be told: not of one in another's."""

    def stepped(self, told: Callable[[], Told]) -> None:
        """It stepped, or skipped, as it is `told` then."""

    def failed(self) -> None:
        """It raised."""


@unseen
def engine_step(engines: HearsEngineSteps, step: Callable[[], Any], told: Callable[[Any], Told]) -> Any:
    """What `step` returns, in which an engine steps; `told` is asked of that."""
    if not engines.begins():
        return step()
    try:
        out = step()
    except BaseException:
        engines.failed()
        raise
    engines.stepped(lambda: told(out))
    return out
