"""Every table of docs/bench.md: `narrowgauge bench` in all its subjects, into results/bench_*_GPU.json.

Without a GPU each subject says in one line what was not measured. torchao stands beside us where it is installed. The
map that ships with the package, in compute/nn/speed_maps/, is a copy of results/bench_map_GPU.json.

    python benchmarks/bench.py [--only step]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import torch
from benchmarks.record import RESULTS

from narrowgauge.cli.main import main as narrowgauge
from narrowgauge.session.machine import hardware

SIZES = ("8b-slice", "1b")


def commands(peer: list[str]) -> dict[str, list[str]]:
    """The name of each result, and the words that make it."""
    steps = {f"step_{size}": ["step", "--size", size, "--precisions", "fp32,tf32,fp16", *peer] for size in SIZES}
    graphs = {f"step_{size}_cuda_graphs": ["step", "--size", size, "--cuda-graphs"] for size in SIZES}
    eager = {f"step_{size}_eager": ["step", "--size", size, "--eager"] for size in SIZES}
    overhead = {f"overhead_{size}": ["overhead", "--size", size] for size in SIZES}
    return {
        "quantize": ["quantize"],
        "gemm": ["gemm"],
        "map": ["gemm", "--sweep"],
        **steps,
        **graphs,
        **eager,
        **overhead,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name begins so")
    args = parser.parse_args()
    peer = ["--peer", "torchao"] if importlib.util.find_spec("torchao") else []
    if torch.cuda.is_available() and not peer:
        print("torchao is not installed, so its rows are missing: pip install torchao")
    slug = "-".join(hardware().lower().split()[1:]) if torch.cuda.is_available() else "none"
    codes = []
    for name, words in commands(peer).items():
        if not name.startswith(args.only):
            continue
        print(f"-- bench {' '.join(words)}", flush=True)
        try:
            narrowgauge(["bench", *words, "--out", str(RESULTS / f"bench_{name}_{slug}.json")])
        except SystemExit as stop:  # it has said why; the others can still be measured
            codes.append(stop.code)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
