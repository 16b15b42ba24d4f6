"""A process beside the program that is none of its children: a program that waits for its children never meets it.

    program ──> shell ──> process        the shell ends at once and has been waited for: who is an orphan is init's
       └───────── pipes ─────┘           it ends when its input does, so with the program, also by a kill -9

`os.wait`, `waitpid(-1)` and a handler of SIGCHLD would take a child's end for that of one of the program's own, or wait
for it. So of ours one signal is left, of the shell's end, with nobody to be waited for. Where there is no shell, it is
a child.

Whatever file has a pipe's number by now is left alone: a program that becomes a daemon closes all that is open.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SHELL = "/bin/sh"
# What a shell starts aside would read from /dev/null.
ASIDE = 'exec 3<&0; "$@" <&3 3<&- &'
PATIENCE = 5.0  # seconds


class Apart:
    """A process that was started; what it says on its standard output is heard, its errors are not.

    Args:
        words: the command.
        environment: its variables, this process's if None.
        folder: where it works, here if None.

    Raises OSError if it cannot be started. (Where the shell could not, it is not running.)
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.said = b""
        shell = os.path.exists(SHELL)
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()
        self._known = {end: _identity(end) for end in (self._in, self._out)}
        try:
            with _handler_waits():
                child = subprocess.Popen(
                    [SHELL, "-c", ASIDE, SHELL, *words] if shell else words,
                    env=environment,
                    cwd=folder,
                    stdin=theirs_in,
                    stdout=theirs_out,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                if shell:
                    child.wait()  # a moment
        except BaseException:
            self.let_go()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._child = None if shell else child

    def running(self) -> bool:
        """Whether it has not ended; does not wait."""
        if self._child is not None:
            return self._child.poll() is None
        while self._heard(0.0):
            pass
        return self._out in self._known

    def stop(self, patience: float = PATIENCE) -> None:
        """End its input, and wait for it to end, but not for longer."""
        self._close(self._in)
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self.listen(patience)
        self.let_go()

    def listen(self, patience: float = PATIENCE) -> bytes:
        """What it said until its end, or until so many seconds have gone by."""
        until = time.monotonic() + patience
        while self._heard(max(0.0, until - time.monotonic())):
            pass
        return self.said

    def let_go(self) -> None:
        """Close what is held of it here: it may have another parent, as after a fork."""
        self._close(self._in)
        self._close(self._out)

    def _heard(self, seconds: float) -> bool:
        """Whether it said something, within so many seconds."""
        if self._child is not None or not self._still(self._out):
            return False
        polled = select.poll()
        polled.register(self._out, select.POLLIN)
        if not polled.poll(1000 * seconds):
            return False
        said = os.read(self._out, 1 << 16)
        self.said += said
        if not said:  # nobody is left who could
            self._close(self._out)
        return bool(said)

    def _still(self, end: int) -> bool:
        """Whether this end of a pipe is open, and ours."""
        if end in self._known and _identity(end) != self._known[end]:
            del self._known[end]
        return end in self._known

    def _close(self, end: int) -> None:
        if self._still(end):
            del self._known[end]
            with contextlib.suppress(OSError):
                os.close(end)


@contextlib.contextmanager
def _handler_waits() -> Iterator[None]:
    """The program's handler of a child's end is called afterwards, in the main thread: others cannot ask it to."""
    number = getattr(signal, "SIGCHLD", None)
    handler = None if number is None else signal.getsignal(number)
    if number is None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(number, lambda sent, frame: came.append(sent))
    try:
        yield
    finally:
        signal.signal(number, handler)
        if came:  # perhaps of a child of its own, too
            signal.raise_signal(number)


def _identity(end: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(end)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def said_by(words: Sequence[str], folder: Path, patience: float = PATIENCE) -> bytes:
    """What a short command says on its standard output, working in `folder`.

    Raises OSError if it cannot be started, subprocess.SubprocessError if it takes longer than `patience` seconds.
    """
    if not os.path.exists(SHELL):
        return subprocess.run(
            words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=patience
        ).stdout
    process = Apart(words, folder=folder)
    try:
        said = process.listen(patience)
        if process.running():
            raise subprocess.TimeoutExpired(list(words), patience)
        return said
    finally:
        process.let_go()
