"""Ports for programs of several ranks, which tests start at the same time."""

import random
import socket
from contextlib import suppress


def free_port():
    """A port that nobody listens on now, below those that connections of other programs are given meanwhile."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("", port))
            return port
