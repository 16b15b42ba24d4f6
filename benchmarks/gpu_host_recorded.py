"""What the host needs for a recorded step of layers that are not ours: the packaged Llama's layers, and few tokens.

    plain       a step that is not recorded, nor watched
    recorded    its layers are recorded
    session     and all else that a run records of a step (norms, updates, the loss)
    followed    a run's step that is not recorded

With so few tokens the GPU waits for the host, and a step takes as long as the host does. What of it a user waits for at
the true size depends on how far the host is ahead there: `bench_foreign_step` measures that. Medians over steps, kinds
of steps in turn; another machine's host may be half as quick.

    python -m benchmarks.gpu_host_recorded [--kinds plain-bf16] [--rounds 3]
    python -m benchmarks.gpu_host_recorded --functions 60
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.bench_foreign_step import Program, Stepper, made
from benchmarks.record import record, transcript

import narrowgauge as ng
from narrowgauge.bench.shapes import sized
from narrowgauge.bench.variants import many_graphs
from narrowgauge.scripts import gpt

WARM, STEPS = 4, 16


def milliseconds(step: Callable[[], object]) -> list[float]:
    """Of each step, from one idle GPU to the next."""
    found = []
    for number in range(WARM + STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= WARM:
            found.append(1e3 * (time.perf_counter() - began))
    return found


def row_of(kind: str, size: gpt.Size, rounds: int) -> dict[str, Any]:
    """A kind's row."""
    device, program = torch.device("cuda"), Program()
    torch.manual_seed(0)
    with device:
        plain = gpt.Llama(size)
    took: dict[str, list[float]] = {"plain": [], "recorded": [], "session": [], "followed": []}
    with many_graphs(), tempfile.TemporaryDirectory() as folder:
        stepper = Stepper(made(plain, kind, False), size, device, kind, program)
        del plain
        for round_ in range(rounds + 1):
            found = {"plain": milliseconds(stepper.plain), "recorded": milliseconds(stepper.recorded)}
            stepper.collector.flush()
            for name, every in (("session", 1), ("followed", 1_000_000_000)):
                config = Path(folder) / "narrowgauge.toml"
                config.write_text(f'[watch]\nevery = {every}\nwhat_if = ["current"]\n')
                with ng.watch(stepper.model, out=Path(folder) / f"{round_}{name}", config=config):
                    found[name] = milliseconds(stepper.plain)
            if round_:  # the first compiles
                for name, each in found.items():
                    took[name] += each
    program.close()
    return {
        "kind": kind,
        "layers": stepper.layers,
        "parameters": sum(1 for _ in stepper.model.parameters()),
        **{f"{name} ms": round(statistics.median(each), 1) for name, each in took.items()},
    }


def functions(kind: str, size: gpt.Size, most: int) -> Path:
    """Where the host's time goes in recorded steps: functions by their own time, of the thread that runs the forward.

    A profiler makes every call longer, so it is their order and number that tells.
    """
    device, program = torch.device("cuda"), Program()
    torch.manual_seed(0)
    with device:
        plain = gpt.Llama(size)
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        stepper = Stepper(made(plain, kind, False), size, device, kind, program)
        config = Path(folder) / "narrowgauge.toml"
        config.write_text('[watch]\nevery = 1\nwhat_if = ["current"]\n')
        with ng.watch(stepper.model, out=Path(folder) / "run", config=config):
            milliseconds(stepper.plain)
            profiler.enable()
            for _ in range(STEPS):
                stepper.plain()
            torch.cuda.synchronize()
            profiler.disable()
    program.close()
    lines = [f"# {kind}, {stepper.layers} linear layers; per step: calls, own us, us with what it calls"]
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, whole, _) in sorted(found.items(), key=lambda item: -item[1][2])[:most]:
        where = file.partition("site-packages/")[2] or file.rpartition("/src/")[2] or Path(file).name
        per_step = calls / STEPS, 1e6 * own / STEPS, 1e6 * whole / STEPS
        lines.append("{:8.1f} {:9.0f} {:9.0f}  {}  {}:{}".format(*per_step, name, where, line))
    return transcript("host_recorded_functions", f"python -m benchmarks.gpu_host_recorded --functions {most}", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="plain-bf16", help="separated by commas")
    parser.add_argument("--size", default="1b", choices=gpt.SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="tell N functions of the first kind")
    args = parser.parse_args()
    if "te-" in args.kinds:
        import transformer_engine.pytorch  # noqa: F401    before torch loads another cuDNN
    size = replace(sized(args.size), batch=1, seq=128)
    if args.functions:
        print(functions(args.kinds.split(",")[0], size, args.functions).read_text())
        return
    rows = [row_of(kind, size, args.rounds) for kind in args.kinds.split(",")]
    record("host_recorded", {"size": args.size, "batch": 1, "seq": 128, "rounds": args.rounds}, rows)


if __name__ == "__main__":
    main()
