"""What several tests of ranks need."""

import pytest
from tests import ports


@pytest.fixture
def free_port():
    """A port that nobody listens on."""
    return ports.free_port()
