"""The waist of the observing river: which files a run is made of and which columns they hold.

    run/
      run.json                                  who wrote it, when, how it ended, the caller's own facts
      run.rank1.json ...                        the same for every further rank
      tensors/rank0-00000007-00000007.parquet   step | rank | attempt | site | one column per metric
      scalars/...                               step | rank | attempt | name | value | wall_time events/...
      step | rank | attempt | kind | site | message | data | wall_time rollups/...
      site | step | per metric m: min:m, max:m, mean:m, count:m

A segment is immutable. It is written under a name that starts with a dot and then renamed, so a reader sees
the whole of it or nothing. Its name says which rank wrote it and which span of that rank's segments it
holds: merging replaces 0..15 by one file 0-15, and until the small files are gone a reader prefers the file
that contains them.

`attempt` counts how often the run was resumed; of two rows for one (site, step), the later attempt counts.
Units: step = optimizer update, wall_time = seconds since the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SCHEMA = 1  # raised only by a change that an older reader would misread
HEATMAP_STEPS = 1000  # a heatmap and a roll-up have at most this many columns

Kind = Literal["tensors", "scalars", "events"]
KINDS: tuple[Kind, ...] = ("tensors", "scalars", "events")
ROLLUPS = "rollups"

KEYS: dict[Kind, dict[str, str]] = {
    "tensors": {"step": "BIGINT", "rank": "INTEGER", "attempt": "INTEGER", "site": "VARCHAR"},
    "scalars": {
        "step": "BIGINT", "rank": "INTEGER", "attempt": "INTEGER",
        "name": "VARCHAR", "value": "DOUBLE", "wall_time": "DOUBLE",
    },
    "events": {
        "step": "BIGINT", "rank": "INTEGER", "attempt": "INTEGER",
        "kind": "VARCHAR", "site": "VARCHAR", "message": "VARCHAR", "data": "VARCHAR", "wall_time": "DOUBLE",
    },
}  # fmt: skip
SORTED_BY: dict[Kind, str] = {"tensors": "site, step", "scalars": "name, step", "events": "step, wall_time"}

_SEGMENT = re.compile(r"rank(\d+)-(\d+)-(\d+)(?:\.(\d+)of(\d+))?\.parquet")


@dataclass(frozen=True, order=True)
class Segment:
    """The name of a segment: whose rows it holds and which of that rank's segments it stands for.

    A compacted span may be cut into `parts` files by site; it counts only when all of them are there.
    """

    rank: int
    first: int
    last: int
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        cut = f".{self.part}of{self.parts}" if self.parts > 1 else ""
        return f"rank{self.rank}-{self.first:08d}-{self.last:08d}{cut}.parquet"

    @classmethod
    def parse(cls, name: str) -> Segment | None:
        """The segment that a file name speaks of, or None for any other file."""
        match = _SEGMENT.fullmatch(name)
        if match is None:
            return None
        rank, first, last = (int(text) for text in match.groups()[:3])
        return cls(rank, first, last, int(match[4] or 0), int(match[5] or 1))

    def contains(self, other: Segment) -> bool:
        """Whether this segment stands for everything that `other` holds."""
        return self.rank == other.rank and self.first <= other.first and other.last <= self.last


def live(segments: Iterable[Segment]) -> list[Segment]:
    """The segments to read: whole spans only, and none that a wider whole span already contains."""
    by_span: dict[tuple[int, int, int, int], list[Segment]] = {}
    for segment in segments:
        by_span.setdefault((segment.rank, segment.first, segment.last, segment.parts), []).append(segment)
    whole = [span for span in by_span if len(by_span[span]) == span[3]]
    # Widest first: a span is kept unless one already kept contains it (equal spans: the one cut finer loses).
    whole.sort(key=lambda span: (span[0], span[1], -span[2], span[3]))
    kept: list[tuple[int, int, int, int]] = []
    for span in whole:
        wider = kept[-1] if kept else None
        if wider is None or not Segment(*wider[:3]).contains(Segment(*span[:3])):
            kept.append(span)
    return sorted(segment for span in kept for segment in by_span[span])


def role_of(site: str) -> str:
    """The role in a site's address "module:role"; "" if there is none.

    >>> role_of("layers.0.mlp.up:grad_output")
    'grad_output'
    """
    return site.rpartition(":")[2] if ":" in site else ""
