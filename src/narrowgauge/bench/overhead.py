"""What watching costs: the step with every statistic of every site recorded, over the same step unwatched.

    overhead = watched / unwatched - 1          every step, and every 10 steps (a mean over 10, one of them recorded)

The watched model hands its tensors to a Collector that writes a run into a temporary folder, as `narrowgauge run` does.
All three are models of their own and take turns; a sample is ten steps. Of CUDA graphs a recorded step is launched
kernel by kernel, as in a session.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from narrowgauge.bench.memory import allocated, peak_bytes
from narrowgauge.bench.result import Result, Row
from narrowgauge.bench.shapes import sized
from narrowgauge.bench.timing import Timing, interleave
from narrowgauge.bench.variants import Stepper, choose_variants, many_graphs
from narrowgauge.compute.nn import set_observer
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.doors.compiled_graphs import launched

BLOCK = 10
EVERY = (1, 10)
GIB = 2**30


class Watched:
    """A stepper whose every `every`-th step is recorded into `folder`."""

    def __init__(self, stepper: Stepper, every: int, folder: Path) -> None:
        self.stepper = stepper
        self.writer = RunWriter(folder, {})
        self.collector = Collector(self.writer, every=every)
        self.steps = 0
        set_observer(stepper.model, self.collector)

    def __call__(self) -> None:
        """One training step, watched."""
        self.steps += 1
        recorded = self.collector.begin_step(self.steps)
        with launched() if recorded else nullcontext():
            self.stepper()
        self.collector.end_step()

    def close(self) -> None:
        """Write what is still held, and end the run."""
        self.collector.flush()
        self.writer.close()


def bench_overhead(
    size_name: str,
    device: torch.device,
    *,
    recipes: Sequence[str] = ("current", "delayed", "rowwise", "blockwise"),
    mode: str = "compiled",
    rounds: int = 4,
    tell: Callable[[str], None] = lambda line: None,
    keep: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Measure the watched step of every recipe; one row per recipe, `rounds` samples of ten steps per variant.

    `tell` gets a line about each recipe, `keep` what there is after each.
    """
    rows: list[Row] = []
    size = sized(size_name)
    settings = {
        "size": size_name, "batch": size.batch, "seq": size.seq, "vocab": size.vocab, "layers": size.layers,
        "mode": mode, "rounds": rounds, "block": BLOCK,
    }  # fmt: skip
    for number, name in enumerate(recipes, start=1):
        tell(f"{name}: unwatched, and watched every step and every {BLOCK} ({number} of {len(recipes)})")
        rows.append(_recipe(size_name, device, name, mode, rounds))
        keep(Result("overhead", settings, list(rows)).so_far())
    return Result("overhead", settings, rows)


def _recipe(size_name: str, device: torch.device, recipe: str, mode: str, rounds: int) -> Row:
    _, variant = choose_variants((), (recipe,), None)
    size = sized(size_name)
    with ExitStack() as stack, many_graphs():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        calls: dict[str, Callable[[], None]] = {}
        peaks: dict[str, float | None] = {}
        watched: dict[int, Watched] = {}
        step: Stepper | None = None
        for every in (None, *EVERY):
            before = allocated(device)
            step = Stepper(variant, size, device, mode, like=step)
            name = "unwatched" if every is None else f"every_{every}"
            calls[name] = step
            if every is not None:
                calls[name] = watched[every] = Watched(step, every, folder / str(every))
                stack.callback(watched[every].close)
            peaks[name] = _peak_gib(calls[name], device, before)
        every_step = watched[1]
        every_step.collector.flush()
        before_seconds, before_steps = every_step.collector.seconds, every_step.steps  # kernels were compiled in these
        took = interleave(calls, device, rounds=rounds, block=BLOCK, lead=2)
        row = _row(variant.name, took, peaks)
        for held in watched.values():
            held.collector.flush()
        own_ms = 1e3 * (every_step.collector.seconds - before_seconds) / (every_step.steps - before_steps)
        row["own_pct"] = round(100 * own_ms / took["every_1"].median, 2)
        row["failures"] = sum(held.collector.failures for held in watched.values())
    return row


def _peak_gib(call: Callable[[], None], device: torch.device, before: int) -> float | None:
    """Compile, warm up, and the most memory that a step then takes above `before` bytes, in GiB."""
    for _ in range(3):
        call()
    peak = peak_bytes(call, device, before)
    return None if peak is None else peak / GIB


def _row(recipe: str, took: dict[str, Timing], peaks: dict[str, float | None]) -> Row:
    row: Row = {"recipe": recipe}
    plain = took["unwatched"].median
    for word, timing in took.items():
        row |= {f"{word}_ms": round(timing.median, 3), f"{word}_p10": round(timing.p10, 3)}
        row[f"{word}_p90"] = round(timing.p90, 3)
        row[f"{word}_host_ms"] = None if timing.host is None else round(timing.host, 3)
        if word != "unwatched":
            row[f"{word}_overhead_pct"] = round(100 * (timing.median / plain - 1), 2)
            more = None if peaks[word] is None else round(float(peaks[word] or 0) - float(peaks["unwatched"] or 0), 3)
            row[f"{word}_more_gib"] = more
    return row
