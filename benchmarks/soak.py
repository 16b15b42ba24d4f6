"""Does a watched training hold on to anything? A micro-model through the real `narrowgauge run`, for very many steps.

    every SAMPLE seconds, from outside       resident memory, open files and threads of the process that trains,
                                             and of the one that exports; files in the run's folder

The first tenth is left out: compilers, allocators and caches fill. What stays after it is judged by the slope of a
line through the samples, and by the largest of the last fifth over the largest of the second.

    python benchmarks/soak.py [--steps 100000] [--every 50] [--export]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.record import record

SAMPLE = 2.0
PROGRAM = """
import os, sys, torch
from torch import nn
open("pid", "w").write(str(os.getpid()))
told = open("step", "w")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 16)
for step in range(int(sys.argv[1])):
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 200 == 199:
        told.seek(0)
        print(step + 1, file=told, flush=True)
    if step % 1000 == 999:
        with torch.no_grad():
            nn.functional.mse_loss(model(x), x)
"""


def facts(pid: int) -> dict[str, int]:
    """Resident KiB, open files and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def below(pid: int) -> list[int]:
    """The processes that a process has started, that these have started, and so on."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    children = [int(word) for word in text.split()]
    return children + [grand for child in children for grand in below(child)]


def exporter(parent: int) -> int | None:
    """The process that exports, if there is one."""
    for pid in below(parent):
        try:
            if "narrowgauge.observe.export" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        except OSError:
            continue
    return None


def sampled(child: subprocess.Popen[bytes], folder: Path) -> list[dict[str, float]]:
    """Samples until the command ends."""
    samples: list[dict[str, float]] = []
    began = time.perf_counter()
    while child.poll() is None:
        time.sleep(SAMPLE)
        try:
            trains = int((folder / "pid").read_text())
            step = int((folder / "step").read_text())
            row = {"seconds": time.perf_counter() - began, "step": step, **facts(trains)}
            row["folder_files"] = sum(1 for path in (folder / "out").rglob("*") if path.is_file())
            other = exporter(child.pid)
            if other is not None:
                row |= {f"export_{name}": value for name, value in facts(other).items()}
        except (OSError, ValueError, KeyError):
            continue  # not there yet, or gone already
        samples.append(row)
    return samples


def judged(samples: list[dict[str, float]], name: str) -> dict[str, float | str]:
    """How one figure went: its slope per 10 000 steps after the first tenth, and late peak over early peak."""
    kept = [row for row in samples if name in row][len(samples) // 10 :]
    steps, values = np.array([row["step"] for row in kept]), np.array([row[name] for row in kept])
    fifth = max(1, len(values) // 5)
    return {
        "what": name,
        "first": float(values[0]),
        "median": float(np.median(values)),
        "last": float(values[-1]),
        "per 10k steps": round(float(np.polyfit(steps, values, 1)[0] * 10_000), 2),
        "late peak / early peak": round(float(values[-fifth:].max() / values[:fifth].max()), 4),
    }


def watched(folder: Path, steps: int, every: int, export: bool) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Samples of a run of so many steps in `folder`, and what the run says of itself."""
    (folder / "train.py").write_text(PROGRAM)
    (folder / "narrowgauge.toml").write_text("[export]\ntensorboard = true\nprometheus = true\n" * export)
    command = [sys.executable, "-c", "from narrowgauge.cli.main import main; main()", "run", "--out", "out"]
    command += ["--every", str(every), "--config", "narrowgauge.toml", "--", "train.py", str(steps)]
    child = subprocess.Popen(command, cwd=folder)
    samples = sampled(child, folder)
    if child.returncode:
        raise SystemExit(f"the command ended with {child.returncode}")
    if not samples:
        raise SystemExit("nothing was sampled: the program ended too soon, or never told its step")
    return samples, json.loads((folder / "out" / "run.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--export", action="store_true", help="TensorBoard and Prometheus beside it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        samples, run = watched(Path(name), args.steps, args.every, args.export)
    names = [name for name in samples[-1] if name not in ("seconds", "step")]
    settings = {
        "steps": args.steps,
        "every": args.every,
        "export": args.export,
        "seconds": round(samples[-1]["seconds"], 1),
        "samples": len(samples),
        "rows lost": sum(run["lost"].values()),
        "status": run["status"],
    }
    thinned = samples[:: max(1, len(samples) // 50)]
    settings["rss_kib by step"] = {str(row["step"]): row["rss_kib"] for row in thinned}
    record("soak", settings, [judged(samples, name) for name in names])


if __name__ == "__main__":
    main()
