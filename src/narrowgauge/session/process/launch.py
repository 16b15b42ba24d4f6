"""Starts a program and waits for it.

launch    one run of a comparison: a Python program in a process of our own (`boot`), telling how far it is
watch     any command as it is: every Python below it is told by its environment to watch itself (`inject`)
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import UsageError
from narrowgauge.session.plan import STATUS_FILE, Plan
from narrowgauge.session.process import inject, untold
from narrowgauge.session.process.command import parse
from narrowgauge.session.process.exporting import exporting
from narrowgauge.session.steps import status

OUTPUT_FILE = "output.log"
INJECTED = Path(inject.__file__).parent
# Those that schedulers send to the process that they started: to stop, to save and be queued again.
PASSED_ON = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
CANNOT_START = {
    errno.ENOEXEC: "it is no program, and a script that does not begin with the one to run it, such as `#!/bin/sh`",
    errno.ENOENT: "it, or the program that its first line names, is not there",
}
POLL = 0.1  # seconds
LAST_LINES = 12


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code (negative: the signal that killed it) and the last lines of its output."""

    code: int
    last_lines: tuple[str, ...]
    seconds: float


def launch(plan: Plan, tell: Callable[[status.Status], None] | None = None, *, quiet: bool = True) -> Ended:
    """Run the plan in a child process; its output goes to `output.log` in the run's folder (unless not quiet)."""
    program = parse(plan.command)
    path = plan.write()
    (plan.folder / STATUS_FILE).unlink(missing_ok=True)
    environment = {
        # Threads that spin while they wait make every step many times slower as soon as anything else runs on the
        # machine, and a comparison is long enough for that. Whoever sets a policy keeps it.
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "PYTHONHASHSEED": str(plan.seed % 2**32),
        "PYTHONUNBUFFERED": "1",
    }
    argv = [program.python, *program.flags, "-m", "narrowgauge.session.process.boot", str(path)]
    began = time.perf_counter()
    if not quiet:
        with exporting(plan.folder, plan.export):
            code = _wait(subprocess.Popen(argv, env=environment), plan, tell)
            seconds = time.perf_counter() - began
        return Ended(code, (), seconds)
    log = plan.folder / OUTPUT_FILE
    with log.open("wb") as out, exporting(plan.folder, plan.export):
        # What the first run read would be missing in the next, and nobody sees a question that goes to a file.
        nothing = subprocess.DEVNULL
        child = subprocess.Popen(argv, env=environment, stdin=nothing, stdout=out, stderr=subprocess.STDOUT)
        code = _wait(child, plan, tell)
        seconds = time.perf_counter() - began
    return Ended(code, _tail(log), seconds)


def watch(plan: Plan, argv: Sequence[str]) -> int:
    """Run `argv` with its own input, output and signals, all of its processes watched as `plan` says; its exit code.

    The plan's file is written. Raises UsageError if the program cannot be started.
    """
    with exporting(plan.folder, plan.export) as told:
        code, pid = _follow(plan.path, argv)
        untold.tell(plan.folder, pid, code)
    for line in told:
        print(f"narrowgauge: {line}", file=sys.stderr)
    return code


def _follow(path: Path, argv: Sequence[str]) -> tuple[int, int]:
    """Its exit code, and which process it was."""
    search = os.pathsep.join([str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, "NARROWGAUGE_PLAN": str(path.resolve())}
    with _passed_on() as to:
        try:
            child = subprocess.Popen(argv, env=environment)
        except OSError as error:
            why = CANNOT_START.get(error.errno or 0, f"{error.strerror}")
            raise UsageError(f"cannot start {argv[0]!r}: {why}; expected `-- train.py ARGS` or a command.") from error
        to(child)
        while True:
            try:
                return child.wait(), child.pid
            except KeyboardInterrupt:
                continue  # the program has been sent the same; it ends as it likes


@contextmanager
def _passed_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass signals on to a process, as soon as there is one: a scheduler tells only the one that it started to stop.

    What comes while it is being started is for it, too. A terminal tells all of them.
    """
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(sent: int, _: object) -> None:
        if children:
            children[0].send_signal(sent)
        else:
            early.append(sent)

    def to(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        before.update({number: signal.signal(number, pass_on) for number in ignored})
        for sent in early:
            child.send_signal(sent)

    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]  # so they are inherited
    before = {number: signal.signal(number, pass_on) for number in PASSED_ON if number not in ignored}
    try:
        yield to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes], plan: Plan, tell: Callable[[status.Status], None] | None) -> int:
    try:
        while True:
            try:
                return child.wait(timeout=POLL)
            except subprocess.TimeoutExpired:
                if tell is not None:
                    tell(status.read(plan))
    except KeyboardInterrupt:
        # The terminal has sent the child the same signal; it closes its run, then we go.
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
        raise


def _tail(log: Path) -> tuple[str, ...]:
    text = log.read_bytes()[-20_000:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return tuple(lines[-LAST_LINES:])
