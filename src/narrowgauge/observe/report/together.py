"""Of which steps a comparison of recipes is, of each site its own, and what of a run it has not.

site s    asked_by(s) = the steps in which every recipe that was asked of s has a row of it
          taken: their second half; of a layer that came late, or runs in few steps, those are others than of the rest
left out  absent    in no step in which any recipe was asked
          unasked   in such a step, and not asked of
          empty     asked of, and zeros: nothing that could be lost
          unmeasured  asked of, where `watch.metrics` leaves out what would tell
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.metrics.site import OPERAND_ROLES
from narrowgauge.observe.store import Run, role_of

NAMED = 3  # sites of one kind that are named


@dataclass(frozen=True)
class LeftOut:
    """Operands that a run recorded, and that are in no comparison of recipes."""

    absent: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """How many, the first by name, and why; "" if there are none."""
        told = []
        if self.absent:
            they = "it was" if len(self.absent) == 1 else "they were"
            told.append(f"{_are_not(self.absent)} in the table: {they} in none of the steps in which all were asked.")
        if self.unasked:
            told.append(
                f"{_are_not(self.unasked)} in the table: FP8 products take no rows of fewer than 16 elements, and "
                "converted layers, or experts in one parameter on a GPU, are asked about only where what_if names "
                "recipes."
            )
        if self.empty:
            them = "it" if len(self.empty) == 1 else "them"
            told.append(f"{_are_not(self.empty)} in the table: what was compared of {them} was zeros alone.")
        if self.unmeasured:
            them = "it" if len(self.unmeasured) == 1 else "them"
            told.append(
                f"{_are_not(self.unmeasured)} in the table: there is no sqnr_db of {them}, and nothing says why. Have "
                "sqnr_db, nan_count and inf_count among watch.metrics."
            )
        return " ".join(told)


def together(others: Sequence[Run]) -> dict[str, tuple[int, ...]]:
    """Of each site that any of these runs has, the second half of the steps in which all that have it asked of it."""
    asked: dict[str, list[set[int]]] = {}
    for run in others:
        for site, steps in _steps(run).items():
            asked.setdefault(site, []).append(steps)
    common = {site: sorted(set.intersection(*each) or set.union(*each)) for site, each in asked.items()}
    return {site: tuple(steps[len(steps) // 2 :]) for site, steps in common.items()}


def left_out(run: Run, others: Sequence[Run], ranked: Mapping[str, object], of: Callable[[str], bool]) -> LeftOut:
    """The run's own operands that are not `ranked`, of those sites that matter (`of`)."""
    asked = {step for each in others for steps in _steps(each).values() for step in steps}
    missing = {
        site: steps
        for site, steps in _steps(run).items()
        if site not in ranked and role_of(site) in OPERAND_ROLES and of(site)
    }
    absent = tuple(sorted(site for site, steps in missing.items() if steps.isdisjoint(asked)))
    return LeftOut(absent, tuple(sorted(missing.keys() - set(absent))))


def _steps(run: Run) -> dict[str, set[int]]:
    table = run.sql("SELECT site, list(DISTINCT step) AS steps FROM tensors GROUP BY site")
    return {str(site): set(map(int, steps)) for site, steps in zip(table["site"], table["steps"], strict=True)}


def _are_not(sites: Sequence[str]) -> str:
    """
    >>> _are_not(["a:input", "b:input", "c:input", "d:input", "e:input"])
    '5 tensors (a:input, b:input, c:input and 2 more) are not'
    """
    more = len(sites) - NAMED
    named = list(sites) if more <= 1 else [*sites[:NAMED], f"{more} more"]
    if len(sites) == 1:
        return f"{named[0]} is not"
    return f"{len(sites)} tensors ({', '.join(named[:-1])} and {named[-1]}) are not"
