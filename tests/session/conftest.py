"""What several tests of ranks need."""

import socket

import pytest


@pytest.fixture
def free_port():
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
