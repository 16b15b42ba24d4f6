"""Does a watched training hold on to anything? A micro-model through the real `narrowgauge run`, for very many steps.

    every SAMPLE seconds, from outside       resident memory, open files and threads of the process that trains,
                                             and of the one that exports; files in the run's folder

It makes so many steps, and more where these take less than LEAST seconds. The first tenth, and no less than WARM steps
and SECONDS, is left out: compilers, allocators and caches fill, and who exports waits for the first segments. What
comes after it is flat, and the soak ends well, if

    memory of the process that trains        rises by less than 24 MiB in 10 000 steps, as a line through the samples
                                             does, and is at most 1.1 times as high in the last fifth as in the first
    of the one that exports                  the same, and 1.25 times: it reads segments, and merged ones at times
    open files, threads                      of each process, and
    files that merging does not account for  in the run's folder, have a median of the last fifth that is less than 3
                                             above that of the first

Merging accounts for the sum of the digits, in base 16, of the number of segments of each kind. Whatever is not flat is
named in a sentence, and the exit code is 1; the limits stand in the result.

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

from narrowgauge.observe.store.compaction import FAN_IN
from narrowgauge.observe.store.schema import KINDS
from narrowgauge.observe.store.source import segments_in

SAMPLE = 0.5
WARM, SECONDS = 20_000, 30.0  # steps; and seconds, of which a segment takes ten
FEWEST = 20  # samples that can be judged
LEAST = SECONDS + 3 * FEWEST * SAMPLE
SLOPE, PEAKS, MEDIANS = "per 10k steps", "late peak / early peak", "late median - early median"
LIMITS: dict[str, dict[str, float]] = {
    "rss_kib": {SLOPE: 24 << 10, PEAKS: 1.1},
    "files": {MEDIANS: 3},
    "threads": {MEDIANS: 3},
    "further_files": {MEDIANS: 3},
    "export_rss_kib": {SLOPE: 24 << 10, PEAKS: 1.25},
    "export_files": {MEDIANS: 3},
    "export_threads": {MEDIANS: 3},
}
MEANT = {
    "rss_kib": "the resident memory (KiB) of the process that trains",
    "files": "the number of open files of the process that trains",
    "threads": "the number of threads of the process that trains",
    "further_files": "the number of files in the run's folder that merging does not account for",
    "export_rss_kib": "the resident memory (KiB) of the process that exports",
    "export_files": "the number of open files of the process that exports",
    "export_threads": "the number of threads of the process that exports",
}
PROGRAM = """
import os, sys, time, torch
from pathlib import Path
from torch import nn
Path("pid").write_text(str(os.getpid()))
told = open("step", "w")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 16)
step, ends = 0, time.monotonic() + float(sys.argv[2])
while step < int(sys.argv[1]) or time.monotonic() < ends:
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 200 == 0:
        told.seek(0)
        print(step, file=told, flush=True)
    if step % 1000 == 0:
        with torch.no_grad():
            nn.functional.mse_loss(model(x), x)
told.truncate(0)
told.close()
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


def in_folder(folder: Path) -> dict[str, int]:
    """The files of a run and of runs inside of it, and those of them that are no segments which merging leaves."""
    found = list(folder.rglob("*"))
    files = sum(1 for path in found if path.is_file())
    left = 0
    for segments in (path for path in found if path.name in KINDS and path.is_dir()):
        written = max((segment.last + 1 for segment in segments_in(segments)), default=0)
        while written:
            written, digit = divmod(written, FAN_IN)
            left += digit
    return {"folder_files": files, "further_files": files - left}


def sampled(child: subprocess.Popen[bytes], folder: Path) -> list[dict[str, float]]:
    """Samples until the command ends, but for what is sampled once the program has made its steps and ends."""
    samples: list[dict[str, float]] = []
    began = time.perf_counter()
    while child.poll() is None:
        time.sleep(SAMPLE)
        try:
            trains = int((folder / "pid").read_text())
            step = int((folder / "step").read_text())
            row = {"seconds": time.perf_counter() - began, "step": step, **facts(trains)}
            row |= in_folder(folder / "out")
            other = exporter(child.pid)
            if other is not None:
                row |= {f"export_{name}": value for name, value in facts(other).items()}
        except (OSError, ValueError, KeyError):
            continue  # not there yet, or gone already, or all steps are made
        samples.append(row)
    return samples


def judged(samples: list[dict[str, float]], name: str) -> dict[str, Any]:
    """How one figure went after the warm-up."""
    warm = max(WARM, samples[-1]["step"] / 10)
    kept = [row for row in samples if name in row and row["step"] >= warm and row["seconds"] >= SECONDS]
    if len(kept) < FEWEST:
        raise SystemExit(
            f"{name} was sampled {len(kept)} times after the first {warm:g} steps and {SECONDS:g} s, "
            f"expected {FEWEST} or more: take more --steps."
        )
    steps, values = np.array([row["step"] for row in kept]), np.array([row[name] for row in kept])
    early, late = values[: max(1, len(values) // 5)], values[-max(1, len(values) // 5) :]
    return {
        "what": name,
        "first": float(values[0]),
        "median": float(np.median(values)),
        "last": float(values[-1]),
        SLOPE: round(float(np.polyfit(steps, values, 1)[0] * 10_000), 2),
        PEAKS: round(float(late.max() / early.max()), 4),
        MEDIANS: float(np.median(late) - np.median(early)),
    }


def problem(row: dict[str, Any]) -> str:
    """What of a figure is not flat, as a sentence; "" if all is, or nothing is asked of it."""
    asked = LIMITS.get(row["what"], {})
    over = [f"{key}: {row[key]:g}, expected less than {most:g}" for key, most in asked.items() if row[key] >= most]
    return f"{MEANT[row['what']]} is not flat ({'; '.join(over)})." if over else ""


def watched(folder: Path, steps: int, every: int, export: bool) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Samples of a run of so many steps in `folder`, and what the run says of itself."""
    (folder / "train.py").write_text(PROGRAM)
    (folder / "narrowgauge.toml").write_text("[export]\ntensorboard = true\nprometheus = true\n" * export)
    command = [sys.executable, "-c", "from narrowgauge.cli.main import main; main()", "run", "--out", "out"]
    command += ["--every", str(every), "--config", "narrowgauge.toml", "--", "train.py", str(steps), str(LEAST)]
    child = subprocess.Popen(command, cwd=folder)
    samples = sampled(child, folder)
    if child.returncode:
        raise SystemExit(f"the command ended with {child.returncode}")
    if not samples:
        raise SystemExit("nothing was sampled: the program ended too soon, or never told its step")
    return samples, json.loads((folder / "out" / "run.json").read_text())


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--export", action="store_true", help="TensorBoard and Prometheus beside it")
    args = parser.parse_args(words)
    if args.steps < 2 * WARM:
        parser.error(f"--steps {args.steps}: the first {WARM} are not judged; expected {2 * WARM} at the least")
    with tempfile.TemporaryDirectory() as name:
        samples, run = watched(Path(name), args.steps, args.every, args.export)
    names = list(dict.fromkeys(name for row in samples for name in row if name not in ("seconds", "step")))
    rows = [judged(samples, name) for name in names]
    missing = [name for name in LIMITS if name not in names and (args.export or not name.startswith("export"))]
    problems = [*filter(None, map(problem, rows)), *(f"{MEANT[name]} was not seen." for name in missing)]
    settings = {
        "steps": samples[-1]["step"],
        "every": args.every,
        "export": args.export,
        "warm": [WARM, SECONDS],
        "seconds": round(samples[-1]["seconds"], 1),
        "samples": len(samples),
        "rows lost": sum(run["lost"].values()),
        "status": run["status"],
        "limits": LIMITS,
        "not flat": problems,
    }
    thinned = samples[:: max(1, len(samples) // 50)]
    for name in ("rss_kib", "export_rss_kib"):
        settings[f"{name} by step"] = {str(row["step"]): row[name] for row in thinned if name in row}
    shown = record("soak", settings, rows)
    if problems:
        raise SystemExit("\n".join([*(f"soak: {each}" for each in problems), f"soak: the figures are in {shown}."]))


if __name__ == "__main__":
    main()
