"""How the ranks of a run ended. Each says it in its own manifest; one that was killed says nothing, and is gone.

    any rank's process is there and writes                      running
    else the worst that any rank came to, in this order         failed, killed, stopped, silent, running, complete

Of a process on another host nobody can ask. It is "running" (who knows) while it gives signs of life, and "silent" once
there was none for a minute: it was killed, stopped, or cannot reach its disk.

An error comes first because it tells why launchers killed the others.

A rank without a manifest made no optimizer, or was gone before, or wrote to another machine's disk: it is named, and
changes nothing. How many there should be, the ranks' metadata say (`ranks.world`); older runs', if they ended well.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from narrowgauge.errors import RunError
from narrowgauge.observe.store import manifest as manifests

WORST_FIRST = ("failed", "killed", "stopped", "silent", "running", "unknown", "complete")
OPEN = ("killed", "silent", "running")  # without an end that they told of
SILENT = 60.0  # seconds; a writer gives a sign of life every 10
SAID = {
    "failed": ("failed", "failed"),
    "killed": ("was killed", "were killed"),
    "stopped": ("was no longer watched", "were no longer watched"),
    "silent": ("has given no sign of life", "have given no sign of life"),
    "running": ("was not seen to end", "were not seen to end"),
    "writes": ("is still running", "are still running"),
}


class End(NamedTuple):
    """One rank's: its state, and why, if it says so."""

    state: str
    why: str = ""
    writes: bool = False  # its process is known to be there
    silence: float = 0.0  # seconds without a sign of life, of one that is silent
    ended: str = ""  # when it told of its end


class Ends:
    """Those of all ranks, as their manifests have it now.

    Args:
        by_rank: the end of each rank that wrote.
        world: how many ranks there were to be; 0 where nobody says.
    """

    def __init__(self, by_rank: dict[int, End], world: int) -> None:
        self.by_rank = by_rank
        self.missing = tuple(sorted(set(range(max(world, 1))) - set(by_rank)))
        self.world = max(world, *(rank + 1 for rank in by_rank), 1)

    def __repr__(self) -> str:
        return f"<ends of a run: {self.words or self.status}>"

    @property
    def status(self) -> str:
        """The run's: "running" while any rank is known to write, else the worst."""
        if any(end.writes for end in self.by_rank.values()):
            return "running"
        states = {end.state for end in self.by_rank.values()}
        return next((state for state in WORST_FIRST if state in states), "unknown")

    @property
    def unended(self) -> tuple[int, ...]:
        """Ranks that wrote, and did not come to an end that they could tell of."""
        return tuple(sorted(rank for rank, end in self.by_rank.items() if end.state in OPEN))

    @property
    def stopped(self) -> bool:
        """Whether the watch of any rank had to end before its program."""
        return any(end.state == "stopped" for end in self.by_rank.values())

    @property
    def words(self) -> str:
        """Which ranks did not come to their end, in words; "" if all did, none has yet, or there is only one that
        is neither silent nor says why it stopped.

        >>> Ends({0: End("complete"), 1: End("killed")}, 4).words
        'rank 1 of 4 was killed; ranks 2 and 3 of 4 recorded nothing here'

        Of several that say why, the first to end: its error may be what ended the others.
        """
        silences = [end.silence for end in self.by_rank.values() if end.state == "silent"]
        lasting = f" for {_lasting(min(silences))}" if silences else ""
        if self.world < 2:
            why = next((end.why for end in self.by_rank.values() if end.state == "stopped"), "")
            return f"no sign of life{lasting}" if silences else why and f"stopped: {why}"
        told = []
        kinds = {rank: "writes" if end.writes else end.state for rank, end in self.by_rank.items()}
        for kind, (is_, are) in SAID.items():
            ranks = sorted(rank for rank, its in kinds.items() if its == kind)
            if ranks and not (kind in ("writes", "running") and len(ranks) == self.world):
                why = self._first_why(ranks)
                long = lasting if kind == "silent" else ""
                told.append(f"{self._named(ranks)} {is_ if len(ranks) == 1 else are}{long}{why}")
        if self.missing:
            told.append(f"{self._named(self.missing)} recorded nothing here")
            if 0 in self.missing and self.by_rank:  # what the ranks merged, and whole steps, would be in its part
                told[-1] += f", so this is the part of {self._named(sorted(self.by_rank))} alone"
        return "; ".join(told)

    def _first_why(self, ranks: Iterable[int]) -> str:
        """
        >>> Ends({0: End("failed", "lost 1", ended="12:02"), 1: End("failed", "no data", ended="12:01")}, 2).words
        'all 2 ranks failed (first rank 1: no data)'
        """
        say = [rank for rank in ranks if self.by_rank[rank].why]
        if not say:
            return ""
        first = min(say, key=lambda rank: self.by_rank[rank].ended or "~")
        which = f"first rank {first}: " if len({self.by_rank[rank].why for rank in say}) > 1 else ""
        return f" ({which}{self.by_rank[first].why})"

    def _named(self, ranks: Iterable[int]) -> str:
        """
        >>> Ends({}, 16)._named([1, 4, 5, 6, 7])
        'ranks 1 and 4 to 7 of 16'
        """
        ranks = list(ranks)
        return f"all {self.world} ranks" if len(ranks) == self.world else f"{in_words(ranks)} of {self.world}"


def in_words(ranks: Iterable[int]) -> str:
    """Ranks, which ascend.

    >>> in_words([3]), in_words([1, 4, 5, 6, 7])
    ('rank 3', 'ranks 1 and 4 to 7')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    names = [f"{s[0]} to {s[-1]}" if len(s) > 2 else " and ".join(map(str, s)) for s in spans]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"rank{'' if spans == [spans[0][:1]] else 's'} {listed}"


def _lasting(seconds: float) -> str:
    """
    >>> _lasting(75), _lasting(600), _lasting(1e4), _lasting(1e6)
    ('75 s', '10 min', '3 h', '12 days')
    """
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class Reader:
    """Reads them, again and again: what has ended stays as it was read, so only those that have not are looked at."""

    def __init__(self, folder: Path, first: manifests.Manifest) -> None:
        self._folder, self._first = folder, first
        self._lead = int(first.get("rank", 0))  # 0, unless its part is missing
        self._ended: dict[int, End] = {}
        self._attempts: dict[int, int] = {}
        self._world = 0

    def read(self) -> Ends:
        """As it is now."""
        self._take(self._lead, self._first if self._first["status"] != "running" else None)
        ranks = {self._lead, *manifests.ranks(self._folder)}
        found = {rank: self._ended.get(rank) or self._take(rank) for rank in sorted(ranks)}
        # Of a run that was continued with fewer ranks, the others' ends are an earlier attempt's.
        newest = self._attempts.get(self._lead, 0)
        return Ends({rank: end for rank, end in found.items() if self._attempts[rank] >= newest}, self._world)

    def _take(self, rank: int, manifest: manifests.Manifest | None = None) -> End:
        self._attempts.setdefault(rank, 0)
        try:
            manifest = manifest or manifests.read(self._folder, rank)
            alive = manifest["status"] == "running" and manifests.is_alive(manifest)
            if alive is False and manifest["status"] == "running":
                manifest = manifests.read(self._folder, rank)  # it may have ended well since it was read
            silence = manifests.silence(self._folder, rank) if alive is None else 0.0
        except (OSError, RunError):
            return End("unknown")
        self._attempts[rank] = int(manifest.get("attempt", 0))
        meta = manifest.get("meta") or {}
        told = meta.get("ranks")
        self._world = max(self._world, int(told.get("world") or 0) if isinstance(told, dict) else 0)
        state = manifests.status(manifest)
        why = str(manifest.get("reason") or (meta.get("error") if state == "failed" else "") or "")
        if state == "running" and silence >= SILENT:
            state = "silent"
        why = next(iter(why.strip().splitlines()), "")
        end = End(state, why, bool(alive) and state == "running", silence, str(manifest.get("ended") or ""))
        if state not in OPEN:
            self._ended[rank] = end
        return end
