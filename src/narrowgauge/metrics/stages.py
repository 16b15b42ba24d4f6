"""Names for the layers of pipeline stages, of which each may call its first layer `0`.

    names that no two stages share    are those of the whole model: they stay
    any that two share                all stages number their own: their layers have `stage<number>.` in front

What was found once holds: not every step records every layer of every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from narrowgauge.metrics.site import WHOLE

Staged = tuple[str, int | None]  # a site, and the stage of a pipeline that it is in


class Stages:
    """The stages of a program.

    >>> stages = Stages()
    >>> stages.learn([("0:input", 0), ("0:input", 1)])
    True
    >>> stages.names([("head:input", 1), ("loss:input", None)])
    ['stage1.head:input', 'loss:input']
    """

    def __init__(self) -> None:
        self._stage: dict[str, int] = {}  # of a layer, the first that was met
        self.apart = False

    def learn(self, sites: Iterable[Staged]) -> bool:
        """Take in what there is; whether names are others from here on."""
        before = self.apart
        for site, stage in sites:
            if stage is not None:
                layer = site.rpartition(":")[0]
                self.apart |= self._stage.setdefault(layer, stage) != stage or _has_it(site, stage)
        return self.apart and not before

    def names(self, sites: Sequence[Staged]) -> list[str]:
        """The sites' names in the run."""
        return [site if not self.apart or stage is None else _with(site, stage) for site, stage in sites]


def _has_it(site: str, stage: int) -> bool:
    return site.startswith((f"stage{stage}.", f"stage{stage}:"))


def _with(site: str, stage: int) -> str:
    if _has_it(site, stage):
        return site
    layer, _, role = site.rpartition(":")
    return f"stage{stage}:{role}" if layer == WHOLE else f"stage{stage}.{site}"
