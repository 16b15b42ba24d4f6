"""run.json: who writes a run, since when, how it ended, and the caller's own facts.

    status   running -> complete | failed | stopped          (a reader adds: killed, silent)

It is replaced as a whole (written aside, then renamed), so a reader never sees half of it. Only an end for which the
disk has no room is written over what is there: ROOM is kept for it, blanks in front of `meta`, from the first time on.

    {"schema": .., "status": "running", .., "reason": "", [blanks] "meta": {..}}      the head is less than a block

The process id, its start time and the host are there for one purpose: to tell a run that is still being written from
one whose process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narrowgauge.errors import RunError
from narrowgauge.observe.store.schema import SCHEMA
from narrowgauge.observe.store.shape import fault

Manifest = dict[str, Any]

ROOM = 512  # bytes: for a reason, times and counts
REASON = 300  # bytes of a reason, as JSON has it, that find room there
META = '\n "meta": '  # in the text; a line break inside of a string is escaped


def name(rank: int) -> str:
    """File name of a rank's manifest: the first rank's is the run's own."""
    return "run.json" if rank == 0 else f"run.rank{rank}.json"


def ranks(folder: Path) -> list[int]:
    """The ranks that have a manifest here, ascending."""
    names = (path.name.removeprefix("run.rank").removesuffix(".json") for path in folder.glob("run.rank*.json"))
    first = [0] if (folder / name(0)).is_file() else []
    return first + sorted(int(number) for number in names if number.isdigit())


def now() -> str:
    """This moment in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def fresh(rank: int, meta: dict[str, Any], attempt: int = 0) -> Manifest:
    """The manifest of a run that starts now, written by this process."""
    return {
        "schema": SCHEMA,
        "status": "running",
        "started": now(),
        "ended": None,
        "rank": rank,
        "attempt": attempt,
        "process": this_process(),
        "lost": {"tensors": 0, "scalars": 0, "events": 0},
        "reason": "",
        "meta": meta,
    }


def unknown() -> Manifest:
    """What stands in for a manifest that was lost: no facts, and no claim about how the run ended."""
    return {"schema": SCHEMA, "status": "unknown", "started": None, "ended": None, "rank": 0, "meta": {}}


def dump(manifest: Manifest) -> str:
    """The manifest as JSON text; what JSON cannot say (a path, a dtype, a NaN) becomes a string."""
    text = json.dumps(plain(manifest), indent=1, allow_nan=False) + "\n"
    return text.replace(META, " " * ROOM + META, 1) if manifest["status"] == "running" else text


def write(folder: Path, manifest: Manifest, *, exclusive: bool = False) -> None:
    """Put the manifest in place as a whole; `exclusive` raises FileExistsError if there is one already."""
    target = folder / name(int(manifest["rank"]))
    aside = folder / f".{target.name}.{os.getpid()}"
    try:
        aside.write_text(dump(manifest), encoding="utf-8")
        if exclusive:
            _link(aside, target)
            aside.unlink()
        else:
            aside.replace(target)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_end(folder: Path, manifest: Manifest) -> None:
    """Put how it ended in place: with all facts, or where the disk has no room for them, with those that are there.

    Errors: OSError, ValueError where not even that can be.
    """
    try:
        write(folder, manifest)
    except OSError:
        with (folder / name(int(manifest["rank"]))).open("r+b", buffering=0) as file:
            there = file.read()
            head, meta, _ = there.partition(META.encode())
            ended = {key: manifest[key] for key in ("status", "ended", "lost", "reason")}
            reason = str(manifest["reason"])[:REASON]
            while len(json.dumps(reason)) > REASON:
                reason = reason[:-1]
            whole = {**json.loads(there), **ended, "reason": reason}
            over = dump(whole).partition(META)[0].encode()
            if not meta or len(over) > len(head):
                raise
            file.seek(0)
            written = file.write(over.ljust(len(head)))
            if written < len(head):  # no file may be as long: as it was
                file.seek(0)
                file.write(there[:written])
                raise


def _link(aside: Path, target: Path) -> None:
    """Name a file without ever replacing another, which rename would do."""
    try:
        os.link(aside, target)
    except FileExistsError:
        raise
    except OSError:  # a filesystem without hard links
        with target.open("x", encoding="utf-8") as file:
            try:
                file.write(aside.read_text(encoding="utf-8"))
                file.flush()
            except OSError:
                target.unlink()
                raise


def read(folder: Path, rank: int = 0) -> Manifest:
    """The manifest of a rank.

    Errors: FileNotFoundError if there is none; RunError if it is not ours, broken, or of a newer schema.
    """
    path = folder / name(rank)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}). {_without(folder)}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int):
        raise RunError(f"{path} has no schema number, so it is not the run.json of a narrowgauge run.")
    if "status" not in manifest:
        raise RunError(f"{path} has no status, so it is not the run.json of a narrowgauge run.")
    if manifest["schema"] > SCHEMA:
        raise RunError(
            f"{folder} was written with run schema {manifest['schema']}; this narrowgauge reads up to schema "
            f"{SCHEMA}. Upgrade narrowgauge to a version that reads schema {manifest['schema']}."
        )
    if wrong := fault(manifest):
        raise RunError(f"{path}: {wrong}. {_without(folder)}")
    return manifest


def _without(folder: Path) -> str:
    return (
        "It was damaged or edited by hand: repair it, or read what was recorded without it by "
        f"open_run({str(folder)!r}, recover=True)."
    )


def process_started(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None where the system does not tell, and of a process that
    has ended and only waits for its parent to ask how.

    Process ids are used again; the pair (id, start) is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        state, *numbers = text.rpartition(")")[2].split()
        return None if state in "ZX" else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return None


def this_process() -> dict[str, Any]:
    """This process's id, start time and host."""
    return {"pid": os.getpid(), "started": process_started(os.getpid()), "host": socket.gethostname()}


def is_alive(manifest: Manifest) -> bool | None:
    """Whether the process that writes this run still exists; None when it ran on another host."""
    process = manifest.get("process") or {}
    pid = process.get("pid")
    if process.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to someone else
    return process.get("started") is None or process_started(pid) == process["started"]


def give_sign(folder: Path, rank: int) -> None:
    """Leave a sign of life of a writer that has nothing to write: other hosts cannot ask for its process."""
    with contextlib.suppress(OSError):
        os.utime(folder / name(rank))


def silence(folder: Path, rank: int) -> float:
    """Seconds since a rank's manifest was last touched, as its writer does every few seconds; of a copy, since then.

    Whoever serves the disk has its own clock; where that is ahead of ours, 0. Errors: OSError.
    """
    return max(0.0, time.time() - (folder / name(rank)).stat().st_mtime)


def status(manifest: Manifest) -> str:
    """How the run ended, with "killed" for a run that says "running" while its process is gone."""
    said = str(manifest.get("status", "unknown"))
    return "killed" if said == "running" and is_alive(manifest) is False else said


def plain(value: Any) -> Any:
    """The same value in what JSON knows."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, str, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # a numpy scalar
        return plain(value.item())
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
