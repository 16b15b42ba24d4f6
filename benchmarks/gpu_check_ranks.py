"""Two ranks over NCCL, watched as they are: what is merged against values by hand, by how many collectives, how late.

    ddp, fsdp2     rows of the last step: both ranks' tensors, each quantized by its own scale; weights once
    amax           delayed scales, converted: from the largest numbers that either rank has seen, the same on both
    sites          2,001 sites take one gather per recorded step, and nothing else
    late           rank 1 sleeps: no step of rank 0's waits for it
    gone           rank 1 is killed: rank 0 trains to its end, and the run can be read
    between        the same after rank 1 has agreed to merge a step: rank 0's gather is ended, and it trains on
    first          so, of the first step that is merged
    split          one process whose model lies on two GPUs
    backward       one process whose optimizers step in the backward pass

Each case is a program of its own (`gpu_ranks_program.py`) under `narrowgauge run`; one that fails is a line.

    python -m benchmarks.gpu_check_ranks [--device cpu --at-once 1] [--cases ddp,late]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_ranks_program import GONE, LEAVES, SITES, SLEEP, STEPS
from benchmarks.record import transcript
from torch import Tensor

from narrowgauge.compute.quant import torch_dtype
from narrowgauge.compute.recipes import by_name
from narrowgauge.observe.store import open_run
from narrowgauge.session.ranks.group import MEETING

PROGRAM = Path(__file__).with_name("gpu_ranks_program.py")
TORCHRUN = ["torchrun"] if shutil.which("torchrun") else [sys.executable, "-m", "torch.distributed.run"]
CASES = ("ddp", "fsdp2", "amax", "sites", "late", "gone", "between", "first", "split", "backward")
ALONE = ("gone", "between", "first")  # without torchrun, which would end the others
EVERY, LIMIT = 4, 150
RECORDED = STEPS // EVERY


class Watched:
    """A case's program, run to its end under `narrowgauge run`."""

    def __init__(self, case: str, device: str, folder: Path) -> None:
        self.case, self.folder, self.out = case, folder, folder / "run"
        folder.mkdir()
        arguments = [str(PROGRAM), case, device, str(folder)]
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *arguments]
        if case in ("split", "backward"):
            command = [sys.executable, *arguments]
        elif case in ALONE:
            quoted = " ".join([sys.executable, *arguments])
            command = ["sh", "-c", f"RANK=1 {quoted} & RANK=0 {quoted}"]
        watch = [sys.executable, "-m", "narrowgauge.cli.main", "run", "--every", str(EVERY), "--out", str(self.out)]
        watch += ["--convert", "delayed"] if case == "amax" else []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"} if case in ALONE else {}
        began = time.perf_counter()
        with (folder / "log").open("w") as log:
            done = subprocess.run(
                [*watch, "--", *command], stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **alone},
            )  # fmt: skip
        self.code, self.seconds = done.returncode, time.perf_counter() - began

    def said(self, name: str, rank: int) -> Any:
        """What the program left."""
        return json.loads((self.folder / f"{name}{rank}.json").read_text())

    def run(self) -> Any:
        """The run, closed or not."""
        return open_run(self.out, recover=self.case in ALONE)

    def complaint(self) -> str:
        """The end of what was printed, files by their names alone."""
        lines = (self.folder / "log").read_text().strip().splitlines()[-12:]
        return re.sub(r"(/[\w.+-]+)+/", "", " | ".join(lines))


def by_hand(parts: list[Tensor], role: str) -> dict[str, float]:
    """Of one tensor in parts, each quantized by its own scale: by the formulas, in float64."""
    fmt = by_name("current").uses(role)[0].fmt
    signal = error = 0.0
    for part in parts:
        x = part.float()
        inv_scale = torch.tensor(fmt.max) / x.abs().max()
        codes = (x * inv_scale).clamp(-fmt.max, fmt.max).to(torch_dtype(fmt))
        signal += float(x.double().square().sum())
        error += float((codes.double() / inv_scale.double() - x.double()).square().sum())
    whole = torch.cat([part.flatten() for part in parts]).double()
    return {
        "numel": whole.numel(),
        "amax": float(whole.abs().max()),
        "mean": float(whole.mean()),
        "std": float(whole.std(correction=0)),
        "sqnr_db": 10 * math.log10(signal / error),
    }


def compared(watched: Watched, ranks: int) -> Iterator[str]:
    """The last step's rows against what the program itself kept."""
    run = watched.run()
    seen = [torch.load(watched.folder / f"seen{rank}.pt") for rank in range(ranks)]
    for key in seen[0]:
        role = key.partition(":")[2]
        parts = [each[key] for each in (seen[:1] if role == "weight" else seen)]
        site = next(site for site in run.sites if site.endswith(key))
        table = run.tensors(sites=[site], steps=[STEPS])
        assert table.rows == 1, f"{site}: {table.rows} rows in step {STEPS}"
        row = {name: table[name][0] for name in table.columns}
        want = by_hand(parts, role)
        worst = max((abs(row[c] - want[c]) / max(abs(want[c]), 1e-3 * want["std"]), c) for c in want)
        assert row["numel"] == want["numel"], f"{site}: numel {row['numel']}, by hand {want['numel']}"
        assert worst[0] < 1e-3, f"{site}: {worst[1]} {row[worst[1]]}, by hand {want[worst[1]]}"
        yield f"  {site:24} numel {int(row['numel']):6}  sqnr {row['sqnr_db']:.4f} dB  worst {worst[1]} {worst[0]:.1e}"


def merged(watched: Watched, steps: int = RECORDED) -> str:
    """How many recorded steps were merged, all of which should be."""
    facts = watched.run().meta["ranks"]
    assert (facts["merged_steps"], facts["apart_steps"]) == (steps, 0), facts
    return f"  merged {facts['merged_steps']} of {steps} recorded steps, over {facts['backend']}"


def parallel(watched: Watched) -> Iterator[str]:
    """ddp, fsdp2."""
    yield merged(watched)
    yield from compared(watched, 2)


def amax(watched: Watched) -> Iterator[str]:
    """The scales of the last step, by what the program itself saw on both ranks before it."""
    yield merged(watched)
    run, largest = watched.run(), [watched.said("largest", rank) for rank in range(2)]
    for key in largest[0]:
        role = key.partition(":")[2]
        site = next(site for site in run.sites if site.endswith(key))
        row = run.tensors(["scale_min", "scale_max"], sites=[site], steps=[STEPS])
        found = {float(row[name][0]) for name in ("scale_min", "scale_max")}
        seen = [each[key] for each in largest]
        fmt = by_name("delayed").uses(role)[0].fmt
        want = float(1 / (torch.tensor(fmt.max) / torch.tensor(max(seen))))
        assert found == {want}, f"{site}: scales {found}, by hand {want}"
        assert role == "weight" or seen[0] != seen[1], f"{key}: both ranks saw the same, so this shows nothing"
        yield f"  {site:24} saw at most {seen[0]:.6g} and {seen[1]:.6g}; scale of both {want:.6g}"


def one_process(watched: Watched) -> Iterator[str]:
    """split, backward."""
    run = watched.run()
    steps = run.scalars("loss")["step"].tolist()
    assert steps == list(range(1, STEPS + 1)), f"steps with a loss: {steps}"
    yield from compared(watched, 1)


def sites(watched: Watched) -> Iterator[str]:
    """One gather for each recorded step."""
    yield merged(watched)
    run = watched.run()
    found = len(run.tensors(["numel"], steps=[STEPS])["numel"])
    assert found == 3 * (SITES // 3 + 1), f"{found} sites"
    started = [watched.said("started", rank) for rank in range(2)]
    meeting = watched.run().meta["ranks"]["backend"] == "nccl"  # by one gather of a single number
    assert started == [{"gather": RECORDED + meeting}] * 2, started
    yield f"  {found} sites; collectives of our own on either rank: {started[0]}"
    seconds = [watched.said("said", rank) for rank in range(2)]
    for rank, each in enumerate(seconds):
        plain = [t for step, t in enumerate(each, 1) if step > EVERY and step % EVERY]
        recorded = [t for step, t in enumerate(each, 1) if step > EVERY and step % EVERY == 0]
        ms = [1e3 * statistics.median(times) for times in (plain, recorded)]
        yield f"  rank {rank}: the host's time for a step {ms[0]:.0f} ms, for a recorded one {ms[1]:.0f} ms"


def late(watched: Watched) -> Iterator[str]:
    """Nobody waits."""
    seconds = watched.said("said", 0)[STEPS // 2 :]
    assert max(seconds) < SLEEP / 4, f"a step of rank 0 took {max(seconds):.1f} s"
    facts = watched.run().meta["ranks"]
    yield f"  rank 1 slept {SLEEP:.0f} s; the slowest step of rank 0 meanwhile: {1e3 * max(seconds):.0f} ms"
    yield f"  merged {facts['merged_steps']}, apart {facts['apart_steps']}, over {facts['backend']}"


def gone(watched: Watched) -> Iterator[str]:
    """The other one trains on."""
    run, steps = watched.run(), STEPS // 2 + STEPS
    last = run.scalars("loss", rank=0)["step"].tolist()[-1]
    rows = len(run.tensors(["numel"], steps=[steps])["numel"])
    assert (last, rows) == (steps, 6), (last, rows)
    yield f"  rank 1 was killed after step {STEPS // 2}; rank 0 has its loss and {rows} rows of step {last}"


def between(watched: Watched) -> Iterator[str]:
    """The other one trains on, after a while."""
    run, steps = watched.run(), STEPS // 2 + STEPS
    table = run.tensors(["numel"], sites=["up:input"])
    rows = zip(table["step"].tolist(), table["rank"].tolist(), table["numel"].tolist(), strict=True)
    sizes = {step: int(numel) for step, rank, numel in rows if rank == 0}
    told = " ".join(run.events("ranks_apart")["message"].tolist())
    slowest = max(watched.said("said", 0))
    assert sorted(sizes) == list(range(EVERY, steps + 1, EVERY)), sizes
    leaves = LEAVES[watched.case]
    whole, own = (48 + 64) * 64, 48 * 64
    assert sizes == {step: whole if step < leaves else own for step in sizes}, sizes
    assert "Ranks are not merged" in told, told
    most = MEETING + GONE if watched.case == "first" else 4 * GONE  # it may have died before the ranks had met
    assert slowest < most, f"a step of rank 0 took {slowest:.1f} s"
    yield f"  rank 1 was killed in step {leaves}; rows of rank 0: {sizes}, over {run.meta['ranks']['backend']}"
    yield f"  the slowest step of rank 0 took {slowest:.1f} s; a rank is gone after {GONE:.0f} without a sign of life"
    yield f"  told: {told[:160]}"


CHECKS: dict[str, Callable[[Watched], Iterator[str]]] = {
    "ddp": parallel, "fsdp2": parallel, "amax": amax, "sites": sites, "late": late, "gone": gone, "between": between,
    "first": between,
    "split": one_process, "backward": one_process,
}  # fmt: skip


def checked(case: str, device: str, folder: Path) -> tuple[bool, list[str]]:
    """A case's lines."""
    lines: list[str] = []
    try:
        watched = Watched(case, device, folder / case)
        head = f"{case}: exit code {watched.code}, {watched.seconds:.0f} s"
        try:
            assert watched.code == 0, "the program failed"
            lines += CHECKS[case](watched)
        except Exception as error:
            lines += [f"  FAILED {type(error).__name__}: {error}", f"  {watched.complaint()}"]
            traceback.print_exc()
    except Exception as error:
        head = f"{case}: FAILED {type(error).__name__}: {error}"
    return not any("FAILED" in line for line in (head, *lines)), [head, *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--at-once", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        found = list(pool.map(lambda case: checked(case, args.device, Path(folder)), args.cases.split(",")))
    lines = [line for _, some in found for line in some]
    good = sum(passed for passed, _ in found)
    lines.append(f"{good} of {len(found)} cases as they should be")
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if args.device == "cuda" else {}
    print("\n".join(lines))
    print(transcript("gpu_ranks", "python -m benchmarks.gpu_check_ranks", lines, further=nccl))
    sys.exit(good != len(found))


if __name__ == "__main__":
    main()
