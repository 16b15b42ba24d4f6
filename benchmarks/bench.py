"""The tables of docs/bench.md, docs/fast_path.md and docs/looks.md, into results/.

`narrowgauge bench` in all its subjects writes bench_*_GPU.json; the casts alone, those that count and the loss after
200 steps write quantize, looks and loss_200. Without a GPU each says in one line what was not measured. torchao stands
beside us where it is installed. The map that ships with the package, compute/nn/conversion/speed_maps/h200.json, was
written by `gemm --sweep` on an H200; a new one is results/bench_map_GPU.json, where GPU is the device's name, such as
h200, and nothing puts it in its place.

    python -m benchmarks.bench [--only step]
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys

import torch
from benchmarks.record import RESULTS, machine

from narrowgauge.cli.main import main as narrowgauge

SIZES = ("8b-slice", "1b")
# what has a file of its own: its name, and what it measures
FURTHER = {
    "quantize": "the casts alone, each layout",
    "looks": "the casts that count",
    "loss_200": "the loss after 200 steps, beside the reference's",
}
MODULES = {"quantize": "gpu_bench_quantize", "looks": "gpu_bench_looks", "loss_200": "gpu_loss_200"}


def commands(peer: list[str]) -> dict[str, list[str]]:
    """The name of each result, and the words that make it."""
    steps = {f"step_{size}": ["step", "--size", size, "--precisions", "fp32,tf32,fp16", *peer] for size in SIZES}
    graphs = {f"step_{size}_cuda_graphs": ["step", "--size", size, "--cuda-graphs", *peer] for size in SIZES}
    eager = {f"step_{size}_eager": ["step", "--size", size, "--eager", *peer] for size in SIZES}
    overhead = {f"overhead_{size}": ["overhead", "--size", size, *peer] for size in SIZES}
    overhead["overhead_1b_cuda_graphs"] = ["overhead", "--size", "1b", "--cuda-graphs"]
    return {
        "quantize": ["quantize", *peer],
        "gemm": ["gemm", *peer],
        "map": ["gemm", "--sweep"],
        **steps,
        **graphs,
        **eager,
        **overhead,
    }


def further(name: str) -> int:
    """Run a file of its own, in a process of its own; its exit code. Without a GPU one line, and 0."""
    print(f"-- {MODULES[name]}", flush=True)
    if not torch.cuda.is_available():
        print(
            f"no GPU here, so this was not measured: {FURTHER[name]}. Run it on a machine with a CUDA GPU.", flush=True
        )
        return 0
    return subprocess.run([sys.executable, "-m", f"benchmarks.{MODULES[name]}"], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name begins so")
    args = parser.parse_args()
    peer = ["--peer", "torchao"] if importlib.util.find_spec("torchao") else []
    if torch.cuda.is_available() and not peer:
        print("torchao is not installed, so its rows are missing: pip install torchao")
    codes: list[int | str | None] = []
    for name, words in commands(peer).items():
        if not name.startswith(args.only):
            continue
        print(f"-- bench {' '.join(words)}", flush=True)
        try:
            narrowgauge(["bench", *words, "--out", str(RESULTS / f"bench_{name}_{machine()}.json")])
        except SystemExit as stop:  # it has said why; the others can still be measured
            codes.append(stop.code)
    codes += [further(name) for name in FURTHER if name.startswith(args.only)]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
