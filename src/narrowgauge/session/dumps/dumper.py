"""Takes the operands that the `[[dump]]` tables choose, as they are quantized, and has them written step by step.

    begin_step(120)     which tables take something of this step?
    operand             copies, where a table selects the site and its cap has room
    end_step            a thread writes the file; only one file waits, so memory holds two steps at most

Whatever goes wrong here is told in the run, and training goes on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.compute.quant import QTensor
from narrowgauge.errors import in_one_line, let_pass
from narrowgauge.observe.stats.arriving import Writer
from narrowgauge.session.dumps.choice import Choice
from narrowgauge.session.dumps.file import StepFile, nbytes_of

FOLDER = "dumps"


class Dumper:
    """Writes the dumps of one process.

    Args:
        tables: the `[[dump]]` tables as plain data.
        writer: told, as an event, when a cap is reached or writing fails.
        folder: the run's folder.
        rank: this process's.
        about: facts for every file's metadata.

    Attributes:
        seconds: what it cost the training thread: making the copies, and waiting for a file that was not written yet.
        files, nbytes: what was written.
    """

    def __init__(
        self,
        tables: Sequence[Mapping[str, Any]],
        writer: Writer,
        folder: Path,
        rank: int = 0,
        about: dict[str, str] | None = None,
    ) -> None:
        self._choices = [Choice(number, table) for number, table in enumerate(tables)]
        self._writer, self._folder, self._rank, self._about = writer, folder / FOLDER, rank, about or {}
        self._open: list[Choice] = []
        self._file: StepFile | None = None
        self._calls: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # on a GPU, backward runs in a thread of its own
        self.seconds = 0.0
        self.files = self.nbytes = 0
        self.failure = ""

    def begin_step(self, step: int) -> bool:
        """Open a step; True if anything of it is chosen."""
        self.end_step()
        self._open = [] if self.failure else [choice for choice in self._choices if choice.opens(step)]
        if self._open:
            self._file = StepFile(step, self._rank, self._about)
            self._calls.clear()
        return bool(self._open)

    def next_due(self, step: int) -> int | None:
        """The next step of which anything is chosen; None without one."""
        steps = [] if self.failure else [choice.next_due(step) for choice in self._choices]
        return min((at for at in steps if at is not None), default=None)

    def made(self, steps: int) -> None:
        """The program made so many, of the last ones of which nobody was told."""
        for choice in self._choices:
            choice.made(steps)

    def wants(self, module: str) -> bool:
        """Whether any operand of a module may be taken in the open step."""
        return any(choice.reaches(module) for choice in self._open)

    def selects(self, module: str, role: str) -> bool:
        """Whether one tensor of a module is taken in the open step."""
        chosen = [choice.selects(module, role) for choice in self._open]  # each hears what there is
        return any(chosen)

    def operand(self, module: str, role: str, x: Tensor, q: QTensor) -> None:
        """Take an operand x [M, K] with its codes, if it is chosen and there is room."""
        chosen = [choice for choice in self._open if choice.selects(module, role)]
        file, site, began = self._file, f"{module}:{role}", time.perf_counter()
        if not chosen or file is None:
            return
        with self._lock:
            micro = self._calls[site]
            self._calls[site] += 1
            if role == "weight" and micro:  # the same in every microbatch
                return
            try:
                if any(self._takes(choice, nbytes_of(x, q), file.step, site) for choice in chosen):
                    file.add(site, micro, x, q)
            except Exception as error:
                self._failed(file.step, error)
            self.seconds += time.perf_counter() - began

    def end_step(self) -> None:
        """Have the open step's file written."""
        file, self._file, self._open = self._file, None, []
        if file is None or not file.tensors:
            return
        self._wait()
        self._thread = threading.Thread(target=self._write, args=(file,), name="narrowgauge-dump", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the process is ending, and takes no new thread: its last step is written here
            self._thread = None
            self._write(file)

    def flush(self) -> None:
        """Wait until everything is written."""
        self.end_step()
        self._wait()

    @property
    def missed(self) -> bool:
        """Whether tables had their steps, and there was no tensor to take."""
        return any(choice.missed for choice in self._choices)

    def notes(self) -> list[str]:
        """What was asked for and not found or not written, one sentence each."""
        return [*([self.failure] if self.failure else []), *(note for c in self._choices for note in c.notes())]

    def facts(self) -> dict[str, Any]:
        """What was written, and what it cost."""
        return {"files": self.files, "bytes": self.nbytes, "seconds": self.seconds}

    def _takes(self, choice: Choice, nbytes: int, step: int, site: str) -> bool:
        if choice.capped:
            return False
        taken = choice.takes(nbytes, step, site)
        if not taken:
            self._writer.add_event(step, "dump_capped", choice.capped, site)
        return taken

    def _wait(self) -> None:
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        self.seconds += time.perf_counter() - began

    def _write(self, file: StepFile) -> None:
        try:
            self.nbytes += file.write(self._folder)
            self.files += 1
        except Exception as error:
            self._failed(file.step, error)

    def _failed(self, step: int, error: Exception) -> None:
        let_pass(error)
        cause = in_one_line(error)
        if not self.failure:
            self.failure = f"dump: step {step} could not be written, and nothing after it was: {cause}."
            self._writer.add_event(step, "dump_failed", self.failure)
