"""What an exporter is given, and what it has to have.

Point     one step's scalars                             loss, grad_norm, lr, step_seconds, ...
Look      one recorded step's tensors, summed up         per role and metric: least, median, greatest and the worst
          and those of single sites that were asked for  site; 12 000 sites would be 12 000 curves that nobody reads
Event     something that happened                        nan, skipped, watch_failed, ...
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """The scalars of one step, by name (NaN: not a number); `wall_time` in seconds since the epoch."""

    step: int
    wall_time: float
    values: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """One metric over all sites of one role in one step: `worst` is the site that to look at first."""

    metric: str
    role: str
    least: float
    median: float
    greatest: float
    worst: str

    def items(self) -> tuple[tuple[str, float], ...]:
        """The three numbers under the names that every tracker shows them by."""
        return ("min", self.least), ("median", self.median), ("max", self.greatest)


@dataclass(frozen=True)
class Look:
    """What one recorded step's tensors were like: all sites summed up, and `sites[address][metric]` of some."""

    step: int
    wall_time: float
    summaries: tuple[Summary, ...]
    sites: dict[str, dict[str, float]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Every number of the look under one flat name each, for trackers that know no labels.

        >>> Look(3, 0.0, (Summary("amax", "input", 1.0, 2.0, 4.0, "a"),), {"b:input": {"amax": 2.0}}).numbers()
        {'amax/input/min': 1.0, 'amax/input/median': 2.0, 'amax/input/max': 4.0, 'sites/b.input/amax': 2.0}
        """
        whole = {f"{s.metric}/{s.role}/{name}": value for s in self.summaries for name, value in s.items()}
        single = {
            f"sites/{site.replace(':', '.')}/{metric}": value
            for site, row in self.sites.items()
            for metric, value in row.items()
        }
        return whole | single

    def worst(self) -> dict[str, str]:
        """`metric/role` to the site that is worst in it."""
        return {f"{s.metric}/{s.role}": s.worst for s in self.summaries}


@dataclass(frozen=True)
class Event:
    """Something that happened; `site` is empty where it concerns the whole run."""

    step: int
    wall_time: float
    kind: str
    message: str
    site: str = ""

    def line(self) -> str:
        """The event as one sentence."""
        where = f" at {self.site}" if self.site else ""
        return f"step {self.step}{where}: {self.message}"


class Exporter:
    """One tracker: what it does not care for it leaves as it is here. Its constructor opens nothing.

    Args:
        folder: the run's folder.
        table: the tracker's own table of the settings.

    Any exception that it raises ends it, and is told once; nobody else is touched. It lives in one thread.
    """

    def __init__(self, folder: Path, table: Mapping[str, Any]) -> None:
        self.folder, self.table = folder, {key: value for key, value in table.items() if value is not None}

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Open the tracker's side of the run, with its name and what is known of it."""

    def scalars(self, points: Sequence[Point]) -> None:
        """Take steps, in order."""

    def look(self, look: Look) -> None:
        """Take what one step's tensors were like; steps come in order, but not in order with those of `scalars`."""

    def event(self, event: Event) -> None:
        """Take something that happened."""

    def flush(self) -> None:
        """Everything that is there for the moment has been given."""

    def close(self, status: str) -> None:
        """The run ended as `status` says ("complete", "failed", ...; "running", "silent": nobody knows)."""


def write(file: str | Path, by: Callable[[str], None]) -> None:
    """Write a file, in a folder that is made; what goes wrong is told of it, not of one that is written aside."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        if Path(file).exists() and not (Path(file).is_file() or Path(file).is_dir()):
            raise OSError(errno.EINVAL, "it is no file, and would be replaced by one")
        by(str(file))
    except OSError as error:
        raise OSError(f"cannot write {file}: {error.strerror}; give another file.") from error
