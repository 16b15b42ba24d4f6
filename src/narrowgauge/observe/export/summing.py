"""One recorded step's rows, some thousand sites times some forty columns, as what a tracker can show.

    per role r and metric m    min m,  median m,  max m,  argmax badness(m)          over the sites of r
    badness(m)                 m,  -m  or  |m - 1|:  see METRICS

DuckDB does it where the columns lie; no row of a site becomes a Python object unless the settings chose that site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from narrowgauge.errors import there_are
from narrowgauge.metrics.site import covers_name
from narrowgauge.observe.export.exporter import Summary
from narrowgauge.observe.export.names import METRICS

MOST_SITES = 200  # whose every metric may be a curve of its own
BADNESS = {"high": "{0}", "low": "-{0}", "off one": "abs({0} - 1)"}
PER_METRIC = 4


def summing_query(table: str, metrics: Sequence[str], where: str) -> str:
    """SQL whose rows are (step, role, then least, median, greatest and worst site of every metric)."""
    picks = []
    for metric in metrics:
        bad = BADNESS[METRICS[metric]].format(metric)
        worst = f"CASE WHEN count({metric}) = 1 OR min({metric}) < max({metric}) THEN arg_max(site, {bad}) END"
        picks.append(f"min({metric}), median({metric}), max({metric}), {worst}")
    columns = ", ".join(["step", "split_part(site, ':', -1) AS role", *picks])
    return f"SELECT {columns} FROM {table} WHERE {where} GROUP BY step, role ORDER BY step, role"


def summaries_of(rows: Iterable[tuple[Any, ...]], metrics: Sequence[str]) -> dict[int, tuple[Summary, ...]]:
    """The rows of `summing_query`, by step; a metric that no site of a role has is left out."""
    found = {}
    for step, group in groupby(rows, key=lambda row: int(row[0])):
        found[step] = tuple(
            Summary(metric, role, float(least), float(median), float(greatest), worst or "")
            for _, role, *numbers in group
            for place, metric in enumerate(metrics)
            for least, median, greatest, worst in [numbers[PER_METRIC * place : PER_METRIC * (place + 1)]]
            if least is not None
        )
    return found


class Chosen:
    """Which sites go out one by one: globs on module names or `module:role`, `!` in front leaves out.

    A name covers everything below it.

    >>> chosen = Chosen(["layers.0", "!*:weight"])
    >>> [site for site in ("layers.0.up:input", "layers.0.up:weight", "layers.1.up:input") if chosen.takes(site)]
    ['layers.0.up:input']
    """

    def __init__(self, globs: Sequence[str]) -> None:
        self.globs = tuple(globs)
        self._unmet = dict.fromkeys(glob for glob in globs if not glob.startswith("!"))
        self.taken: set[str] = set()
        self.refused = 0  # sites that match, beyond the most that may
        self._known: dict[str, bool] = {}

    def takes(self, site: str) -> bool:
        """Whether this site goes out."""
        if site not in self._known:
            for glob in [glob for glob in self._unmet if _covers(glob, site)]:
                del self._unmet[glob]
            takes = self._matches(site)
            if takes and len(self.taken) >= MOST_SITES:
                takes, self.refused = False, self.refused + 1
            elif takes:
                self.taken.add(site)
            self._known[site] = takes
        return self._known[site]

    def unmet(self) -> list[str]:
        """What of the globs was not followed, in one sentence."""
        if self.refused:
            return [f"export.sites: {self.refused} sites beyond the first {MOST_SITES} that match were left out."]
        if not self._known or (self.taken and not self._unmet):
            return []
        modules = list(dict.fromkeys(site.rpartition(":")[0] for site in self._known))
        there_is = f"{there_are(list(map(repr, modules)), most=5)}."
        if self._unmet:
            return [f"export.sites: no recorded site matches {', '.join(map(repr, self._unmet))}; {there_is}"]
        without = [glob for glob in self.globs if glob.startswith("!")]
        others = " that the others match" if len(without) < len(self.globs) else ""
        leave = f"{', '.join(map(repr, without))} leave{'' if len(without) > 1 else 's'} out"
        return [f"export.sites: {leave} every recorded site{others}; {there_is}"]

    def _matches(self, site: str) -> bool:
        plain = [glob for glob in self.globs if not glob.startswith("!")]
        without = [glob[1:] for glob in self.globs if glob.startswith("!")]
        inside = any(_covers(glob, site) for glob in plain) if plain else bool(without)
        return inside and not any(_covers(glob, site) for glob in without)


def _covers(glob: str, site: str) -> bool:
    module, _, role = site.rpartition(":")
    wanted, colon, wanted_role = glob.rpartition(":")
    if not colon:
        wanted, wanted_role = glob, "*"
    return covers_name(wanted, module) and fnmatchcase(role, wanted_role)
