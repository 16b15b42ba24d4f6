"""One `[[dump]]` table at work: what it chooses, and how much of its cap is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowgauge.session.selection.globs import SiteGlobs
from narrowgauge.session.selection.step_ranges import StepRanges

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Choice:
    """What one table chooses.

    Args:
        number: which table, from 0.
        table: it, as plain data.
    """

    def __init__(self, number: int, table: Mapping[str, Any]) -> None:
        self._key = f"dump[{number}]"
        self._steps = StepRanges(table["steps"])
        self._sites = SiteGlobs(f"{self._key}.sites", table["sites"], roles=table["roles"])
        self.cap = int(table["cap"])
        self.used = 0
        self.capped = ""  # what was said when the cap was reached
        self._made = self._met = 0

    def opens(self, step: int) -> bool:
        """Whether it takes anything of a step that begins."""
        self._made = step
        met = step in self._steps
        self._met += met
        return met and not self.capped

    def next_due(self, step: int) -> int | None:
        """The next step that it takes something of, behind this one; None without one."""
        return None if self.capped else self._steps.next(step)

    def made(self, steps: int) -> None:
        """The program made so many, of the last ones of which nobody was told."""
        self._made = steps

    def selects(self, module: str, role: str) -> bool:
        """Whether it takes a site, of a step that it takes."""
        return not self.capped and self._sites.selects(module, role)

    def reaches(self, module: str) -> bool:
        """Whether it may take any site of a module."""
        return not self.capped and self._sites.reaches(module)

    def takes(self, nbytes: int, step: int, site: str) -> bool:
        """Whether so much still fits under the cap; what does not fit closes the table for good."""
        if self.used + nbytes > self.cap:
            self.capped = (
                f"{self._key}: its cap of {size(self.cap)} was reached at step {step}: {site} has {size(nbytes)} more. "
                "Nothing was written for it from there on; give it a larger cap, or fewer sites or steps."
            )
            return False
        self.used += nbytes
        return True

    @property
    def missed(self) -> bool:
        """Whether its steps came, and no tensor that it could take or leave."""
        return self._met > 0 and not self._sites.asked

    def notes(self) -> list[str]:
        """What was asked for and not found, and where the cap was reached."""
        notes = [self.capped] if self.capped else []
        if not self._met and self._made:
            notes.append(f"{self._key}.steps: none of them was reached; the program made {self._made} steps.")
        return [*notes, *self._sites.unmatched()]


def size(nbytes: int) -> str:
    """Bytes in words.

    >>> size(3 << 29)
    '1.5 GiB'
    """
    amount, unit = float(nbytes), 0
    while amount >= 1024 and unit < len(UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.4g} {UNITS[unit]}"
