"""The import contracts hold, and each fails on a violation planted in a copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PASSED = "Contracts: 5 kept, 0 broken."
# contract -> (file, line to plant)
VIOLATIONS = {
    "Floors: imports only climb": ("formats/planted.py", "import narrowgauge.compute.quant"),
    "The compute river never imports the observing river": (
        "compute/planted.py",
        "import narrowgauge.observe.store",
    ),
    "Reading a run needs no torch": ("observe/store/planted.py", "import torch"),
    "A watched program loads no checker of settings": ("session/process/inject/planted.py", "import pydantic"),
    "No cycles inside a folder": (
        "metrics/one.py",
        "import narrowgauge.metrics.two\n# planted in the other: import narrowgauge.metrics.one",
    ),
}


def lint(folder):
    """import-linter's output on the package in `folder` (its configuration beside it)."""
    env = {**os.environ, "PYTHONPATH": str(folder / "src")}
    code = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "src", tmp_path / "src", ignore=ignore)
    return tmp_path


def test_the_contracts_hold(copy):
    status, output = lint(copy)
    assert status == 0, output
    assert PASSED in output


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_planted_violation_breaks_its_contract(copy, contract):
    file, line = VIOLATIONS[contract]
    planted = copy / "src" / "narrowgauge" / file
    planted.write_text(f'"""Planted."""\n{line}\n')
    if "two" in line:
        planted.with_name("two.py").write_text('"""Planted."""\nimport narrowgauge.metrics.one\n')
    status, output = lint(copy)
    assert status != 0
    assert f"{contract} BROKEN" in output
