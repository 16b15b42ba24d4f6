"""Every kernel is compiled and assembled for Hopper and for Ada, which this machine need not have."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused.watched.tensor_cores import EACH

FUSED = Path(narrowgauge.__file__).parent / "compute" / "kernels" / "fused"
ROOT = FUSED.parents[4]
PRODUCERS = ROOT / "benchmarks" / "producers"


def launched(*folders):
    """The names of all kernels that no other calls: those that take an address and are launched."""
    text = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    kernels = re.findall(r"@triton\.jit(?:\(.*\))?\ndef (\w+)\(\s*\w+_ptr\b", text)
    return {name for name in kernels if not re.search(rf"(?<!def )(?<!\.)\b{name}\(", text)}


def compiled(tmp_path, *words):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "tests.compute.kernels.for_gpus", *words]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_all_kernels_compile_and_keep_their_numbers_in_registers(tmp_path):
    found = compiled(tmp_path)
    assert {row["kernel"] for row in found} == launched(FUSED, PRODUCERS) != set()
    assert {row["kernel"] for row in found if row["fed"]} >= {"_watched", "_watched_blocks", "_watched_rows"}
    for row in found:
        assert row["fed"] in ([], [[True, EACH.value]]), row
        assert row["stack"] <= 192, row  # bytes: some numbers of the few programs that look at errors
        assert row["registers"] * row["warps"] * 32 <= 65536, row
        assert row["shared"] <= 48 << 10, row


def test_all_kernels_compile_for_gpus_that_do_not_compare_16_bit_numbers_in_pairs(tmp_path):
    found = compiled(tmp_path, "89")
    assert {row["kernel"] for row in found} == launched(FUSED) != set()
    for row in found:
        assert row["fed"] == [], row
        assert row["registers"] * row["warps"] * 32 <= 65536, row
        assert row["shared"] <= 48 << 10, row
