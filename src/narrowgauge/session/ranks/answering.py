"""A store that is waited for by seconds, whatever it is asked, and asked nothing more once it has not answered.

torch bounds `get` and `wait` (`set_timeout`), and waits without end for the answer to `add`, `check` and `compare_set`:
for as long as the process that has the store is stopped, or its machine is. But a connection's own socket can be told
how long, and torch raises then. What comes too late would be read as the answer to the next question.

Source: torch 2.13, torch/csrc/distributed/c10d/Utils.hpp (recvBytes).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

OPEN = Path("/proc/self/fd")
INTERNET = socket.AF_INET, socket.AF_INET6


class Answering:
    """Such a store.

    Args:
        store: a `torch.distributed.Store`.
        seconds: after which it is given up, by an exception, if its connection is `bounded`.

    Attributes:
        store: itself; it takes what it is told (`set`) without an answer.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self.store = store
        self._lost: Exception | None = None
        with suppress(Exception):  # not every store has a time to wait
            store.set_timeout(timedelta(seconds=seconds))

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self.store, name)

        def asked(*args: Any) -> Any:
            if self._lost is not None:
                raise self._lost
            try:
                return ask(*args)
            except dist.DistError as error:
                self._lost = error
                raise

        return asked


def innermost(store: Any) -> Any:
    """The store that has the keys, below those that put a prefix before them."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    return store


def lines(store: Any) -> set[int]:
    """The connections of this process to a store over TCP; none where nobody says which there are."""
    port, found = getattr(innermost(store), "port", None), set()
    for name in os.listdir(OPEN) if port and OPEN.is_dir() else ():
        with suppress(OSError), _of(int(name)) as line:
            if line.family in INTERNET and line.getpeername()[1] == port:
                found.add(int(name))
    return found


def bound(line: int, seconds: float) -> None:
    """Have what is read from a connection raise after so many seconds without an answer."""
    with suppress(OSError), _of(line) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


@contextmanager
def _of(descriptor: int) -> Iterator[socket.socket]:
    """What torch's own socket is, which stays open."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()
