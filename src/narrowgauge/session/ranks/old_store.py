"""The store of a group that this rank has left, as long as rank 0's process still has it.

Rank 0 settles what is open before it takes the group down, and with it the store. Another rank that is done earlier,
and makes a group at the same address meanwhile, would come to the old store, and lose it. So it waits in that place for
the old one to be gone, as it waits there for the new one without us. It is gone when a connection to it has ended.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from narrowgauge.session.ranks.answering import innermost
from narrowgauge.session.ranks.meeting import programs_own

PATIENCE = 30.0  # seconds; rank 0 has fewer to settle what is open


class OldStore:
    """What this rank knows of it: a connection, on which nothing is ever said."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None

    def part(self) -> None:
        """The program is about to take its group down."""
        self.close()
        met = programs_own()
        if met is None or met.rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return  # the launcher has the store, and keeps it
        store = innermost(met.store)
        host, port = getattr(store, "host", None), getattr(store, "port", None)
        if host and port:  # torch's own over TCP; others have no address that anybody could take
            with suppress(OSError):
                self._line = socket.create_connection((host, port), 1.0)

    def wait(self) -> None:
        """The program is about to make a group: until the store of the last one is gone, within seconds."""
        if self._line is not None:
            with suppress(OSError):  # among them that it is not gone in time
                self._line.settimeout(PATIENCE)
                self._line.recv(1)
            self.close()

    def close(self) -> None:
        """Nobody waits for it any more."""
        if self._line is not None:
            self._line.close()
            self._line = None
