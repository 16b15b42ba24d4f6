"""Of a program that came to its end by itself and could not write so: that its run is none of a killed process.

Its process had no file descriptor left, was replaced (`os.execv`), or left without Python's knowing (C's `_exit`).
Whoever started it knows how it ended; of processes that it started itself nobody here does.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from narrowgauge.errors import RunError
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.inside import folders_inside


def tell(folder: Path, pid: int, code: int) -> None:
    """Write for process `pid`, which ended with exit code `code`, what it has not; nothing where a signal ended it."""
    for path in (folder, *folders_inside(folder)) if code >= 0 else ():
        for rank in manifests.ranks(path):
            with suppress(OSError, ValueError, RunError):
                manifest = manifests.read(path, rank)
                wrote = (manifest.get("process") or {}).get("pid") == pid
                if wrote and manifests.status(manifest) == "killed":
                    why = manifest["reason"] or f"its process ended (exit code {code}) and could not write so"
                    told = {"status": "stopped", "reason": why, "ended": manifests.now()}
                    manifests.write_end(path, {**manifest, **told})
