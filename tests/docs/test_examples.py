"""Every example runs as a stranger would run it, and fits on a screen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(warm_python, example: Path, tmp_path: Path):
    done = warm_python.run([sys.executable, str(example)], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"
    assert not done.stderr.strip(), done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_fits_on_a_screen(example: Path):
    lines = example.read_text().splitlines()
    assert len(lines) <= 50
    assert lines[0].startswith('"""')
