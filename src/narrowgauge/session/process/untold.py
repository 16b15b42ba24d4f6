"""What only whoever started a program knows of its end: of processes that it started itself nobody here knows it.

could not write     it had no file descriptor left, was replaced (`os.execv`), or left without Python's knowing (C's
                    `_exit`): its run is none of a killed process
wrote an end        and its exit code says otherwise (`sys.exit(3)` tells nobody in the process): that code is a fact
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from narrowgauge.errors import RunError
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.inside import folders_inside


def tell(folder: Path, pid: int, code: int) -> None:
    """Write for process `pid`, which ended with exit code `code` (below 0, by a signal), what it has not."""
    for path in (folder, *folders_inside(folder)):
        for rank in manifests.ranks(path):
            with suppress(OSError, ValueError, RunError):
                manifest = manifests.read(path, rank)
                if (manifest.get("process") or {}).get("pid") != pid:
                    continue
                status = manifests.status(manifest)
                if code and status == "complete":
                    manifests.write(path, {**manifest, "meta": {**manifest["meta"], "exit_code": code}})
                elif code >= 0 and status == "killed":
                    why = manifest["reason"] or f"its process ended (exit code {code}) and could not write so"
                    told = {"status": "stopped", "reason": why, "ended": manifests.now()}
                    manifests.write_end(path, {**manifest, **told})
