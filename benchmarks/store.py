"""What the store costs the training thread, and how fast a long run reads back.

    python benchmarks/store.py            about 4 minutes, 3 GB of disk; writes results/store.json and .md
    python benchmarks/store.py --quick    a twentieth of the steps, nothing written to results/

1. add       the training thread's time to hand over one step of 2,000 sites x 20 metrics (and two 64-bin
             histograms) while segments are written, and while the disk stands still. Wall time counts what other
             processes take of the cores, and waiting for the interpreter lock; CPU time is the thread's own
2. stall     turns of a thread that computes in small pieces, with and without a writer beside it
3. write     values per second from hand-over to Parquet, and bytes per value on disk
4. read      one series of 100,000 steps and a heatmap of 200 sites, from the segments as written and after
             compaction. The files are in the page cache; "newly opened" includes opening the run
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from narrowgauge.observe.store import Run, RunWriter, compact, open_run
from narrowgauge.observe.store.segments import SegmentWriter

RESULTS = Path(__file__).parent / "results"
METRICS = [
    "numel", "amax", "amin", "mean", "std", "l2", "nan_count", "inf_count", "underflow_pct", "saturation_pct",
    "mse", "sqnr_db", "cosine", "gain", "lost_energy_pct", "p5_row_sqnr_db", "p5_col_sqnr_db", "kurtosis",
    "scale_min", "scale_max",
]  # fmt: skip
COUNTS = {"numel", "nan_count", "inf_count"}


def columns_of(sites: int, seed: int, histograms: bool = False) -> dict[str, np.ndarray]:
    """Random float32 metrics (their mantissas do not compress, like real ones) and counts that do."""
    random = np.random.default_rng(seed)
    columns: dict[str, np.ndarray] = {}
    for name in METRICS:
        values = random.standard_normal(sites, np.float32)
        columns[name] = np.full(sites, 4096 if name == "numel" else 0) if name in COUNTS else values
    if histograms:
        for name in ("exponent_histogram", "block_range_histogram"):
            columns[name] = random.poisson(30, (sites, 64)).astype(np.uint32)
    return columns


def sites_of(count: int) -> list[str]:
    roles = ("input", "weight", "grad_output", "output")
    return [f"model.layers.{n // 28}.block.{n // 4 % 7}:{roles[n % 4]}" for n in range(count)]


def milliseconds(samples: list[float]) -> dict[str, float]:
    ordered = sorted(1e3 * sample for sample in samples)
    at = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 4) for name, share in at.items()}


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def add_cost(folder: Path, steps: int, *, histograms: bool, stuck: bool = False) -> dict[str, Any]:
    """One hand-over per 20 ms, while the writer thread compresses what came before."""
    sites = sites_of(2000)
    data = [columns_of(2000, seed, histograms) for seed in range(8)]
    original, gate = SegmentWriter.tensors, threading.Event()
    if stuck:
        SegmentWriter.tensors = lambda self, batches: (gate.wait(), original(self, batches))[1]
    writer = RunWriter(folder, flush_rows=50_000)
    try:
        samples, own = [], []
        for step in range(steps):
            used = time.thread_time()
            samples.append(timed(lambda step=step: writer.add_tensors(step, sites, data[step % 8])))
            own.append(time.thread_time() - used)
            time.sleep(0.0 if stuck else 0.02)
        gate.set()
        writer.close(timeout=300)
    finally:
        SegmentWriter.tensors = original
    lost = {"rows_lost": writer.lost["tensors"], "rows": 2000 * steps}
    return {"wall": milliseconds(samples), "cpu": milliseconds(own), **lost}


def stall(folder: Path | None, seconds: float) -> dict[str, Any]:
    """Work of about 1 ms in small pieces, again and again; how long the slowest turn takes, and how many fit."""
    writer = RunWriter(folder, flush_rows=50_000) if folder else None
    sites, data = sites_of(2000), columns_of(2000, 0, histograms=True)
    vector, samples, fed = np.ones(256), [], 0.0
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        for _ in range(400):
            vector = vector * 1.0 + 0.0
        samples.append(time.perf_counter() - now)
        if writer and now - fed > 0.05:  # a step every 50 ms: 40,000 rows a second with histograms
            writer.add_tensors(len(samples), sites, data)
            fed = now
    if writer:
        writer.close()
    return {**milliseconds(samples), "turns": len(samples)}


def write_run(folder: Path, sites: int, steps: int) -> dict[str, Any]:
    names = sites_of(sites)
    # One block of random numbers, read from another place at every step: no stretch of it repeats.
    noise = np.random.default_rng(0).standard_normal(8 << 20, np.float32)
    counts = columns_of(sites, 0)
    writer = RunWriter(folder, queue_bytes=1 << 30)
    started = time.perf_counter()
    for step in range(steps):
        start = step * 7919 % (len(noise) - sites * len(METRICS))
        block = noise[start : start + sites * len(METRICS)].reshape(len(METRICS), sites)
        columns = {name: counts[name] if name in COUNTS else row for name, row in zip(METRICS, block, strict=True)}
        writer.add_tensors(step, names, columns)
        writer.add_scalars(step, loss=1.0 / (step + 1), grad_norm=1.0, lr=1e-4, step_seconds=0.1)
        while writer._waiting.held > 40 << 20:  # segments of ordinary size, and no row lost
            time.sleep(0.01)
    writer.close(timeout=600)
    seconds, values = time.perf_counter() - started, sites * steps * len(METRICS)
    size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
    return {
        "sites": sites, "steps": steps, "metrics": len(METRICS), "seconds": round(seconds, 1),
        "million_values_per_second": round(values / seconds / 1e6, 1), "bytes_per_value": round(size /
        values, 2), "megabytes": round(size / 1e6), "files": len(list(folder.rglob("*.parquet"))),
        "rows_lost": writer.lost["tensors"],
    }  # fmt: skip


def read_cost(folder: Path, sites: int) -> dict[str, dict[str, float]]:
    """Wall and process CPU time of each kind of question, ms: the median of several, each about another site."""
    names = sites_of(sites)
    run = open_run(folder)
    first = iter(range(1, 1000))

    def series(of: Run, **options: Any) -> None:
        number = next(first)
        steps, _ = of.series(names[number * 31 % sites], METRICS[number % 20], **options)
        assert len(steps)

    questions: dict[str, tuple[int, Callable[[], Any]]] = {
        "series, newly opened": (5, lambda: series(open_run(folder))),
        "series": (15, lambda: series(run)),
        "series thinned to 2,000 points": (5, lambda: series(run, max_points=2000)),
        "heatmap of all sites": (3, lambda: run.heatmap("underflow_pct")),
        "sites": (3, lambda: run.sites),
        "steps": (3, lambda: run.steps),
        "scalars": (3, lambda: run.scalars()),
    }
    result = {}
    for name, (times, ask) in questions.items():
        cpu, wall = [], []
        for _ in range(times):
            used = time.process_time()
            wall.append(timed(ask))
            cpu.append(time.process_time() - used)
        result[name] = {"wall": round(1e3 * statistics.median(wall), 1), "cpu": round(1e3 * statistics.median(cpu), 1)}
    return result


def machine() -> dict[str, Any]:
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": models[0] if models else platform.processor(), "cores": os.cpu_count(),
        "python": platform.python_version(), "numpy": np.__version__, "duckdb": duckdb.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    host, write = result["machine"], result["write"]
    lines = [
        "# The store", "",
        f"{host['cpu']}, {host['cores']} cores; Python {host['python']}, numpy {host['numpy']}, "
        f"DuckDB {host['duckdb']}; {host['date']}. Made by `python benchmarks/store.py`.", "",
        "| handing over one step of 2,000 sites, ms | wall median | p99 | max | CPU median | max | rows lost |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, cost in result["add"].items():
        wall, cpu = cost["wall"], cost["cpu"]
        lost = f"{cost['rows_lost']:,} of {cost['rows']:,}"
        times = (wall["median"], wall["p99"], wall["max"], cpu["median"], cpu["max"], lost)
        lines.append(f"| {name} | {' | '.join(map(str, times))} |")
    lines += [
        "",
        "| turns of 1 ms of small Python work, ms | median | p99 | max | turns |",
        "|---|---|---|---|---|",
    ]
    for name, cost in result["stall"].items():
        lines.append(f"| {name} | {cost['median']} | {cost['p99']} | {cost['max']} | {cost['turns']:,} |")
    done = result["compact"]
    lines += [
        "",
        f"A run of {write['sites']} sites x {write['steps']:,} steps x {write['metrics']} metrics: "
        f"{write['seconds']} s to write, {write['million_values_per_second']} M values/s, "
        f"{write['bytes_per_value']} bytes per value, {write['megabytes']:,} MB in {write['files']} files; "
        f"compacted in {done['seconds']} s to {done['files']} files, {done['megabytes']:,} MB.",
        "", "| reading, ms (CPU time of both threads) | as written | compacted |", "|---|---|---|",
    ]  # fmt: skip
    straight, compacted = result["read"]["as written"], result["read"]["compacted"]
    for name in straight:
        cells = [f"{cost['wall']} ({cost['cpu']})" for cost in (straight[name], compacted[name])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Load average of the machine's {host['cores']} cores while this ran: {result['load']}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the runs are written and removed again")
    options = parser.parse_args()
    steps, pace = (options.steps // 20, 0.2) if options.quick else (options.steps, 1.0)
    before = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=options.folder))
    try:
        result: dict[str, Any] = {"machine": machine(), "add": {}, "stall": {}, "read": {}}
        add = result["add"]
        add["20 metrics"] = add_cost(folder / "add", int(300 * pace), histograms=False)
        add["20 metrics and 2 histograms"] = add_cost(folder / "hist", int(300 * pace), histograms=True)
        add["the same, disk stands still"] = add_cost(folder / "stuck", 1000, histograms=True, stuck=True)
        result["stall"]["alone"] = stall(None, 10 * pace)
        result["stall"]["while runs are written"] = stall(folder / "stall", 10 * pace)
        run = folder / "run"
        result["write"] = write_run(run, options.sites, steps)
        result["read"]["as written"] = read_cost(run, options.sites)
        started = time.perf_counter()
        done = compact(run)
        result["compact"] = {
            "seconds": round(time.perf_counter() - started, 1), "files": done.files_after,
            "megabytes": round(done.bytes_after / 1e6),
        }  # fmt: skip
        result["read"]["compacted"] = read_cost(run, options.sites)
        result["load"] = " to ".join(f"{load:.1f}" for load in sorted((before, os.getloadavg()[0])))
    finally:
        shutil.rmtree(folder)
    print(markdown(result))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "store.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "store.md").write_text(markdown(result))


if __name__ == "__main__":
    main()
