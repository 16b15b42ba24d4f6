"""`make bench` measures what the tables of the docs come from, or says in one line of each that it did not."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import bench

REPOSITORY = Path(__file__).parents[2]


IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:  # peers that are not installed
        if error.name.split(".")[0] in ("narrowgauge", "benchmarks", "tests"):
            raise
"""


def test_every_benchmark_still_finds_what_it_measures():
    names = sorted(path.stem for path in (REPOSITORY / "benchmarks").glob("*.py"))
    command = [sys.executable, "-c", IMPORT, *names]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_peer_stands_beside_every_subject_but_the_map_and_graphs_watched():
    words = bench.commands(["--peer", "torchao"])
    assert [name for name, these in words.items() if "--peer" not in these] == ["map", "overhead_1b_cuda_graphs"]
    assert not [name for name, these in bench.commands([]).items() if "--peer" in these]


def test_without_a_gpu_each_file_of_its_own_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench.subprocess, "run", lambda *args, **kwargs: pytest.fail("it was run"))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "lo"])
    assert bench.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "-- gpu_bench_looks",
        "no GPU here, so this was not measured: the casts that count. Run it on a machine with a CUDA GPU.",
        "-- gpu_loss_200",
        "no GPU here, so this was not measured: the loss after 200 steps, beside the reference's. "
        "Run it on a machine with a CUDA GPU.",
    ]


def test_with_a_gpu_each_is_run_and_one_that_fails_costs_none_of_the_others(monkeypatch):
    ran = []

    def run(command, check):
        ran.append(command[1:])
        return SimpleNamespace(returncode=1 if command[-1].endswith("looks") else 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "machine", lambda: "h200")
    monkeypatch.setattr(bench, "commands", lambda peer: {})
    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert bench.main() == 1
    modules = ["gpu_bench_quantize", "gpu_bench_looks", "gpu_loss_200"]
    assert ran == [["-m", f"benchmarks.{name}"] for name in modules]
    assert all((REPOSITORY / "benchmarks" / f"{name}.py").is_file() for name in modules)
