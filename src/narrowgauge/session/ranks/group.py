"""A process group of our own, which no call of the program can be mistaken for, and its one collective.

    gather    every rank's table [size] -> rank 0's [world, size]; of a GPU's group, once of one number as ranks meet

It is made from its backend's own class, by a store, as the ranks first merge: `new_group` would be a barrier in the
program's own group. Asked whether a gather is done, it answers; it is waited for at the end of the program alone, and
there for seconds. A gather that a rank will never join is no burden on a CPU. On a GPU it is: a kernel that runs until
it is aborted, for which everything waits that waits for the device.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.session.ranks.patience import POLL

PATIENCE = timedelta(minutes=10)  # for ranks to come by that have said they will; the program's own limit is like this
MEETING = 30.0  # seconds of them that training, or what is merged, can wait
LEAVING = 5.0  # seconds for a GPU's communicator to be taken down
_NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Gather:
    """One gather under way; `rows` [world, size] is on rank 0, once done."""

    def __init__(self, work: Any, mine: Tensor, rows: Tensor | None, stream: Any) -> None:
        self._work, self._mine, self.rows, self.stream = work, mine, rows, stream
        self.began = time.monotonic()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._work.is_completed())

    def check(self) -> None:
        """Raise what it ended with; the current stream goes on only behind it."""
        self._work.wait()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched in here runs beside the program's own work."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield


class Group:
    """The process group. Ranks meet while the program trains on, in a thread of their own.

    Args:
        store: one that all ranks share, and nobody else writes to.
        rank, world: which of how many.
        device: where the tables are.
    """

    def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
        self._rank, self._world = rank, world
        self._on_gpu = device.type == "cuda"
        self._asked: float | None = None  # when it was first to be ready
        self._stream: Any = None
        self._group: Any = None
        self._error: Exception | None = None
        self.aborted = False  # whether gathers look done that are not
        self._meeting = threading.Thread(target=self._meet, args=(store, device), name="narrowgauge-ranks", daemon=True)
        self._meeting.start()

    def ready(self, seconds: float, *, wait: bool = False) -> bool:
        """Whether all ranks have met. A GPU's are waited for, so many seconds; on a CPU, unless told to `wait`, it is
        to be asked again, and they have MEETING seconds from the first time on: by then all ranks have come.

        Raises:
            RuntimeError: this torch has no backend for the device, or not all ranks came.
        """
        self._asked = self._asked or time.monotonic()
        if self._on_gpu or wait:
            self._meeting.join(seconds)
        meeting = self.meeting  # asked before the group, which is there as it ends
        if self._group is not None:
            return True
        if meeting and not self._on_gpu and time.monotonic() - self._asked < MEETING:
            return False
        raise RuntimeError(f"the ranks did not meet: {self._error or f'not all of them came in {seconds:.0f} s'}")

    def _meet(self, store: Any, device: torch.device) -> None:
        try:
            self._open(store, self._rank, self._world, device)
        except Exception as error:
            self._error = error

    def _open(self, store: Any, rank: int, world: int, device: torch.device) -> None:
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            torch.cuda.set_device(device)  # of this thread
            with _harmless():
                group = dist.ProcessGroupNCCL(store, rank, world, options)
            # Left to the first gather, meeting would hold up the program's own thread. So would that gather, which
            # waits on the host until all ranks have come to it: one of a single number comes before all others.
            group.eager_connect_single_device(device)
            self._first(group, torch.zeros(1, dtype=torch.float64, device=device))
            self._group = group
        else:
            self._group = dist.ProcessGroupGloo(store, rank, world, PATIENCE)

    def _first(self, group: Any, mine: Tensor) -> None:
        """Make the first gather, and wait for it, but for no rank that will never join."""
        gather, until = self._launched(group, mine), time.monotonic() + MEETING
        while not gather.done():
            if time.monotonic() > until:
                group.abort()
                raise RuntimeError("a rank was gone before the first gather")
            time.sleep(POLL)
        gather.check()

    @property
    def meeting(self) -> bool:
        """Whether it still waits for ranks, in its thread."""
        return self._meeting.is_alive()

    @property
    def backend(self) -> str:
        """Its name."""
        return "gloo" if self._stream is None else "nccl"

    def gather(self, mine: Tensor) -> Gather:
        """Send `mine` [size], of one size on all ranks, to rank 0; returns at once."""
        return self._launched(self._group, mine)

    def _launched(self, group: Any, mine: Tensor) -> Gather:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(mine.device))
            mine.record_stream(self._stream)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            rows = mine.new_empty(self._world, mine.numel()) if self._rank == 0 else None
            options = dist.GatherOptions()
            options.rootRank = 0
            work = group.gather([] if rows is None else [list(rows.unbind(0))], [mine], options)
        return Gather(work, mine, rows, self._stream)

    def abort(self) -> None:
        """End a gather that a rank will never join; from any thread. The group is of no more use.

        On a CPU nothing waits for such a gather, and nothing is done.
        """
        if self._group is not None and self._stream is not None and not self.aborted:
            self.aborted = True
            self._group.abort()

    def close(self, *, broken: bool) -> None:
        """Leave it.

        A `broken` one may have a gather that never ends, and taking it apart would wait for that: it is left behind
        for the end of the process.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if broken:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if self._stream is None:
            return
        if self.aborted:
            return
        leaving = threading.Thread(target=group.abort if broken else group.shutdown, daemon=True)
        leaving.start()
        leaving.join(LEAVING)


@contextmanager
def _harmless() -> Iterator[None]:
    """Inside, NCCL's watchdog is told to leave the process alone, should a collective of the group fail."""
    before = os.environ.get(_NCCL)
    os.environ[_NCCL] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL]
        else:
            os.environ[_NCCL] = before
