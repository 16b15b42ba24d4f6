"""`import narrowgauge` loads almost nothing, and whoever only reads runs never needs torch."""

import subprocess
import sys

import pytest

BLOCK_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked in this test")
sys.meta_path.insert(0, Blocked())
"""
TORCH_FREE = [
    "narrowgauge",
    "narrowgauge.errors",
    "narrowgauge.formats",
    "narrowgauge.metrics",
    "narrowgauge.observe",
    "narrowgauge.observe.store",
    "narrowgauge.observe.verdict",
    "narrowgauge.observe.figures",
    "narrowgauge.observe.report",
    "narrowgauge.observe.export.follower",
]


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


def test_importing_the_package_loads_neither_torch_nor_numpy():
    heavy = {"torch", "numpy", "duckdb", "bokeh", "rich"}
    code = f"import sys, narrowgauge; dir(narrowgauge); print({heavy} & sys.modules.keys())"
    assert python(code)[1] == "set()"


def test_the_blocker_blocks():
    status, _, stderr = python(BLOCK_TORCH + "import narrowgauge; narrowgauge.convert")
    assert status != 0
    assert "torch is blocked in this test" in stderr


def test_every_reader_imports_without_torch():
    status, _, stderr = python(BLOCK_TORCH + "\n".join(f"import {name}" for name in TORCH_FREE))
    assert status == 0, stderr


@pytest.mark.parametrize("name", ["errors", "formats", "open_run"])
def test_torch_free_public_names_load_without_torch(name):
    status, _, stderr = python(BLOCK_TORCH + f"import narrowgauge as ng; ng.{name}")
    assert status == 0, stderr
