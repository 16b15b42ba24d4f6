"""A run that has ended, for every exporter."""

import pytest
from tests.observe.export.recorded import STEPS, write

from narrowgauge.observe.store import RunWriter


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has ended, in several segments."""
    folder = tmp_path / "run"
    with RunWriter(folder, {"command": "train.py", "versions": {"torch": "9.9"}}) as writer:
        for step in range(1, STEPS + 1):
            write(writer, step)
            if step % 9 == 0:
                writer.flush()
        writer.update_meta(notes=["two layers were passed over"])
    return folder
