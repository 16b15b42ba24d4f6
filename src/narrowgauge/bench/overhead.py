"""What watching costs: the step with every statistic of every site recorded, over the same step unwatched.

    overhead = watched / unwatched - 1          every step, and every 10 steps (a mean over 10, one of them recorded)

The watched model hands its tensors to a Collector that writes a run into a temporary folder, as `narrowgauge run` does.
All three are models of their own and take turns; a sample is ten steps. A peer's layers are looked at as foreign ones
(`watched`). own_pct is what the collector says it cost, over the step: read after so many steps that all kinds of
recorded steps have been, because whatever is compiled while a GPU waits for it would be counted as its time.
gpu_pct compares the time in which the GPU ran anything, of ten profiled steps each: what is left of the overhead where
the host is quick enough.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from narrowgauge.bench.memory import allocated, forget, peak_bytes
from narrowgauge.bench.peers import check_peer
from narrowgauge.bench.phases import busy_ms
from narrowgauge.bench.result import Result, Row
from narrowgauge.bench.shapes import sized
from narrowgauge.bench.timing import Timing, interleave
from narrowgauge.bench.variants import Stepper, Variant, choose_variants, many_graphs
from narrowgauge.bench.watched import Watched
from narrowgauge.errors import in_one_line

BLOCK = 10
EVERY = (1, 10)
WARM = 2 * BLOCK - 2  # steps before memory and time are read; the next two hold a recorded one of every ten
GIB = 2**30


def bench_overhead(
    size_name: str,
    device: torch.device,
    *,
    recipes: Sequence[str] = ("current", "delayed", "rowwise", "blockwise"),
    mode: str = "compiled",
    rounds: int = 4,
    peer: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
    keep: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Measure the watched step of every recipe, and of a peer's; one row each, of `rounds` samples of ten steps.

    `tell` gets a line about each recipe, `keep` what there is after each. Raises UsageError for a peer that
    is not there.
    """
    if peer is not None:
        check_peer(peer)
    _, *variants = choose_variants((), recipes, peer)
    rows: list[Row] = []
    size = sized(size_name)
    settings = {
        "size": size_name, "batch": size.batch, "seq": size.seq, "vocab": size.vocab, "layers": size.layers,
        "mode": mode, "rounds": rounds, "block": BLOCK, "peer": peer,
    }  # fmt: skip
    for number, variant in enumerate(variants, start=1):
        tell(f"{variant.name}: unwatched, and watched every step and every {BLOCK} ({number} of {len(variants)})")
        try:
            rows.append(_variant(size_name, device, variant, mode, rounds))
        except Exception as error:
            if variant.peer is None:
                raise
            rows.append({"recipe": variant.name, "error": in_one_line(error)})
        keep(Result("overhead", settings, list(rows)).so_far())
    return Result("overhead", settings, rows)


def _variant(size_name: str, device: torch.device, variant: Variant, mode: str, rounds: int) -> Row:
    size = sized(size_name)
    forget(device)  # or what the last one left in cycles lies there now, and is gone before a step's peak is taken
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
            peaks[name] = _peak_gib(calls[name], device, before, 3 if every is None else WARM)
        every_step = watched[1]
        every_step.collector.flush()
        before_seconds, before_steps = every_step.collector.seconds, every_step.steps
        took = interleave(calls, device, rounds=rounds, block=BLOCK, lead=2)
        row = _row(variant.name, took, peaks)
        for held in watched.values():
            held.collector.flush()
        own_ms = 1e3 * (every_step.collector.seconds - before_seconds) / (every_step.steps - before_steps)
        row["own_pct"] = round(100 * own_ms / took["every_1"].median, 2)
        if device.type == "cuda":
            row |= _on_the_gpu(calls, device)
            for held in watched.values():
                held.collector.flush()
        row["failures"] = sum(held.collector.failures for held in watched.values())
    return row


def _peak_gib(call: Callable[[], None], device: torch.device, before: int, warm: int) -> float | None:
    """Compile, warm up, and the most memory that a step then takes above `before` bytes, in GiB."""
    for _ in range(warm):
        call()
    peak = peak_bytes(call, device, before)
    return None if peak is None else peak / GIB


def _on_the_gpu(calls: Mapping[str, Callable[[], None]], device: torch.device) -> Row:
    """How long a step keeps the GPU busy, in milliseconds, and how much longer if it is watched, in percent."""
    busy = {word: busy_ms(call, device, BLOCK) for word, call in calls.items()}
    row: Row = {f"{word}_gpu_ms": round(ms, 3) for word, ms in busy.items()}
    plain = busy["unwatched"]
    return row | {f"{word}_gpu_pct": round(100 * (ms / plain - 1), 2) for word, ms in busy.items() if ms is not plain}


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
