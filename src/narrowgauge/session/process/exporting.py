"""Exports while a program runs: a process of its own reads the run's folder and feeds the trackers.

    with exporting(plan.folder, plan.export) as told:        starts it, unless nothing is to be exported
        ...the program runs...
    told                                                     what the user should know of how it went

It gets no signal of the terminal, and ends when its input does: with this `with`, or with us. That what it forgot,
because a tracker failed or hung, also stands in the run's notes; and there alone what `[export]` asked in vain, which
the command tells with what the other tables did.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.errors import RunError
from narrowgauge.observe.export.names import KNOWN, chosen
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.session.process.codes import describe_code

LOG = "export.log"
REPORT = "export.json"
PATIENCE = 60.0  # seconds that trackers get, after the program's end, for what they have not taken yet
GRACE = 10.0  # and their process, to end by itself


@contextlib.contextmanager
def exporting(folder: Path, settings: Mapping[str, Any], *, patience: float = PATIENCE) -> Iterator[list[str]]:
    """Export the run that will be in `folder` as the `[export]` table says; the list is filled at the end.

    Nothing that goes wrong with it reaches the program or the caller. Ask `narrowgauge.observe.export.check` before.
    """
    told: list[str] = []
    if not chosen(settings):
        yield told
        return
    try:
        child = _start(folder, settings, patience)
    except OSError as error:
        told.append(f"export: could not be started: {error.strerror}.")
        yield told
        return
    try:
        yield told
    finally:
        ended, unmet = _end(child, folder, settings, patience)
        told += ended
        if not note(folder, [*ended, *unmet], unmet):
            told += unmet


def _start(folder: Path, settings: Mapping[str, Any], patience: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "narrowgauge.observe.export"]
    environment = {name: value for name, value in os.environ.items() if name != "NARROWGAUGE_PLAN"}
    with (folder / LOG).open("wb") as log:
        child = subprocess.Popen(
            argv, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    asked = {"folder": str(folder.resolve()), "settings": dict(settings), "patience": patience}
    if child.stdin is not None:
        with contextlib.suppress(OSError):  # it is gone already: told at the end
            child.stdin.write(json.dumps(asked).encode() + b"\n")
            child.stdin.flush()
    return child


def _end(
    child: subprocess.Popen[bytes], folder: Path, settings: Mapping[str, Any], patience: float
) -> tuple[list[str], list[str]]:
    """Wait for the process, but not for ever; what there is to tell, and what the settings asked of it in vain."""
    if child.stdin is not None:
        with contextlib.suppress(OSError):
            child.stdin.close()
    names = ", ".join(KNOWN[name].title for name in chosen(settings))
    hanging = []
    try:
        child.wait(patience + GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        hanging = [f"export to {names} took all, but did not end and was killed: some of it may be missing there."]
    try:
        report: dict[str, Any] = json.loads((folder / REPORT).read_text())
    except (OSError, ValueError):
        if hanging:
            return [f"export to {names} did not end and was killed: some of it is missing there."], []
        # One that a signal ended had no time to write why.
        why = f"{folder / LOG} says why" if child.returncode >= 0 else "some of it is missing there"
        return [f"export to {names} ended early ({describe_code(child.returncode)}); {why}."], []
    told = [
        f"export to {KNOWN[name].title} stopped after step {row['step']}: {row['problem']}"
        for name, row in report.items()
        if row["problem"]
    ]
    notes, unmet = (list(dict.fromkeys(x for row in report.values() for x in row[key])) for key in ("notes", "unmet"))
    return told + (hanging if not told else []) + notes, unmet


def note(folder: Path, told: Sequence[str], unmet: Sequence[str] = ()) -> bool:
    """Leave it in the run's notes, and what is `unmet` of the settings where the command looks for that.

    False if there is no run, or none that has ended.
    """
    if not told:
        return True
    with contextlib.suppress(OSError, RunError):
        manifest = manifests.read(folder, *manifests.ranks(folder)[:1])
        if manifest["status"] == "running" and manifests.is_alive(manifest) is not False:
            return False  # its writer would overwrite it
        meta = dict(manifest.get("meta", {}))
        more = {"notes": told, "unmet": unmet}
        meta |= {key: [*meta.get(key, ()), *texts] for key, texts in more.items() if texts}
        manifests.write(folder, {**manifest, "meta": meta})
        return True
    return False
