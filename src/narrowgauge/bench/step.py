"""A whole training step in every precision and recipe, beside a peer's, in one process and in turn.

    x BF16      = median of BF16's step / median of this one, both from the same rounds
    TFLOP/s     = FLOPs of the model / median           (see `shapes`; what is recomputed is not counted)
    of ceiling  = (FP8 FLOPs / FP8 ceiling + other FLOPs / that precision's ceiling) / median

Variants are built one after the other; a variant's peak memory is what its own steps added to what lay there before it
was built; of CUDA graphs, the steps in which they were captured. Then variants take turns. If they do not all fit in
memory, each one's step beside what the others hold, they are measured in groups, and BF16 is in every one.

Energy and phases come last, variant by variant. Compiling takes most of the time, so that what is known is handed on as
soon as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.bench import phases
from narrowgauge.bench.ceilings import Ceilings, measure_ceilings
from narrowgauge.bench.energy import EnergyMeter, joules_per_call
from narrowgauge.bench.memory import Need, allocated, forget, peak_bytes, side_by_side
from narrowgauge.bench.peers import check_peer
from narrowgauge.bench.result import Result, Row
from narrowgauge.bench.shapes import sized, step_flops
from narrowgauge.bench.timing import Timing, interleave
from narrowgauge.bench.variants import Stepper, Variant, choose_variants, many_graphs
from narrowgauge.errors import in_one_line

GIB = 2**30
LEAD = 1  # the first step of a turn pays for the one before


@dataclass
class _Built:
    """A variant that is ready, and what was learned while it was made so."""

    stepper: Stepper
    resting: int
    peak_bytes: int | None
    compile_facts: dict[str, int]

    @property
    def need(self) -> Need:
        return Need(self.resting, self.peak_bytes or 0)


@dataclass
class _Measured:
    timing: Timing
    bf16: Timing
    joules: float | None
    extra: dict[str, Any] = field(default_factory=dict)


def bench_step(
    size_name: str,
    device: torch.device,
    *,
    recipes: Sequence[str] = ("current", "delayed", "rowwise", "blockwise"),
    precisions: Sequence[str] = (),
    peer: str | None = None,
    mode: str = "compiled",
    rounds: int = 6,
    samples: int = 5,
    brief: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    keep: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Measure the training step of `size_name` and return one row per variant.

    `rounds` turns per variant of `samples` steps each; compiling takes longer than that, and `tell` gets a line about
    each variant. `keep` gets what there is once all have taken their turns, and again after each one's energy
    and phases, which `brief` leaves out. Raises UsageError for a peer that is not there.
    """
    if peer is not None:
        check_peer(peer)
    variants = choose_variants(precisions, recipes, peer)
    size, meter = sized(size_name), EnergyMeter(device)
    ceilings = measure_ceilings(device)
    settings = {
        "size": size_name, "batch": size.batch, "seq": size.seq, "vocab": size.vocab, "layers": size.layers,
        "mode": mode, "rounds": rounds, "samples": samples, "peer": peer,
    }  # fmt: skip
    notes = [f"energy: {meter.reason}"] if meter.reason else []

    def result(rows: dict[str, Row]) -> Result:
        return Result("step", settings, [rows[v.name] for v in variants if v.name in rows], ceilings.to_dict(), notes)

    with many_graphs():
        rows = _all(
            variants, size_name, device, mode, rounds, samples, None if brief else meter, ceilings, tell,
            lambda found: keep(result(found).so_far()),
        )  # fmt: skip
    return result(rows)


def _all(
    variants: Sequence[Variant],
    size_name: str,
    device: torch.device,
    mode: str,
    rounds: int,
    samples: int,
    meter: EnergyMeter | None,
    ceilings: Ceilings,
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Row]], None],
) -> dict[str, Row]:
    """Build and measure every variant, in as many groups as memory asks for."""
    rows: dict[str, Row] = {}
    alive: list[_Built] = []
    for number, variant in enumerate(variants, start=1):
        tell(f"{variant.name}: building and warming up ({number} of {len(variants)})")
        if len(alive) > 1 and not _fits([built.need for built in alive] + [_guess(variant, alive[0])], device):
            _measure(alive, rounds, samples, meter, ceilings, rows, keep)
            del alive[1:]
            forget(device)
        try:
            alive.append(_build(variant, size_name, device, mode))
        except Exception as error:
            if not alive:  # without BF16 there is nothing to compare with
                raise
            cause = in_one_line(error)
            rows[variant.name] = {"variant": variant.name, "error": cause}
            forget(device)
        if len(alive) > 2 and not _fits([built.need for built in alive], device):  # it took more than was guessed
            _measure(alive[:-1], rounds, samples, meter, ceilings, rows, keep)
            del alive[1:-1]
            forget(device)
    tell(f"{len(alive)} variants take turns")
    _measure(alive, rounds, samples, meter, ceilings, rows, keep)
    return rows


def _build(variant: Variant, size_name: str, device: torch.device, mode: str) -> _Built:
    counters = torch._dynamo.utils.counters
    before = allocated(device)
    counters.clear()
    stepper = Stepper(variant, sized(size_name), device, mode)
    at_capture = peak_bytes(stepper, device, before, steps=3)
    facts = {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}
    counters.clear()
    peak = peak_bytes(stepper, device, before)
    if mode == "cuda-graphs":  # a replayed graph allocates nothing: its memory was taken when it was captured
        peak = at_capture
    facts["recompiles"] = counters["stats"]["unique_graphs"]
    forget(device)
    return _Built(stepper, allocated(device) - before, peak, facts)


def _guess(variant: Variant, bf16: _Built) -> Need:
    """What a variant will need that is not built yet."""
    return bf16.need.times(2.4 if variant.wide else 1.4)


def _fits(needs: Sequence[Need], device: torch.device) -> bool:
    """Whether such variants find room on the device, each in its turn."""
    if device.type != "cuda":
        return True
    return side_by_side(needs, torch.cuda.get_device_properties(device).total_memory)


def _measure(
    group: Sequence[_Built],
    rounds: int,
    samples: int,
    meter: EnergyMeter | None,
    ceilings: Ceilings,
    rows: dict[str, Row],
    keep: Callable[[dict[str, Row]], None],
) -> None:
    """Add the group's rows to `rows`, and hand them to `keep`; a variant that another group has measured is left.

    Without a meter, neither energy nor phases.
    """
    device = group[0].stepper.device
    steppers = {built.stepper.variant.name: built.stepper for built in group}
    timings = interleave(steppers, device, rounds=rounds, samples=samples, lead=LEAD)
    new = [built for built in group if built.stepper.variant.name not in rows]
    for built in new:
        measured = _Measured(timings[built.stepper.variant.name], timings["bf16"], None)
        rows[built.stepper.variant.name] = _row(built, measured, ceilings)
    keep(rows)
    if meter is None:
        return
    for built in new:
        name = built.stepper.variant.name
        joules = joules_per_call(meter, built.stepper, device, timings[name].median)
        extra = phases.profile(built.stepper, device) if device.type == "cuda" else {}
        rows[name] = _row(built, _Measured(timings[name], timings["bf16"], joules, extra), ceilings)
        keep(rows)


def _row(built: _Built, measured: _Measured, ceilings: Ceilings) -> Row:
    stepper, ms = built.stepper, measured.timing.median
    variant, size = stepper.variant, stepper.size
    linear, other = step_flops(size)
    ideal = ceilings.seconds(linear, "fp8" if variant.recipe else variant.precision)
    rest = ceilings.seconds(other, variant.precision)
    return {
        "variant": variant.name,
        "ms": round(ms, 3),
        "p10": round(measured.timing.p10, 3),
        "p90": round(measured.timing.p90, 3),
        "host_ms": None if measured.timing.host is None else round(measured.timing.host, 3),
        "x_bf16": round(measured.bf16.median / ms, 4),
        "bf16_ms": round(measured.bf16.median, 3),
        "peak_gib": None if built.peak_bytes is None else round(built.peak_bytes / GIB, 3),
        "tokens_per_s": round(1e3 * size.batch * size.seq / ms),
        "joules": None if measured.joules is None else round(measured.joules, 2),
        "tflops": round((linear + other) / ms / 1e9, 2),
        "of_ceiling_pct": None if ideal is None or rest is None else round(1e5 * (ideal + rest) / ms, 1),
        "loss": round(float(stepper.loss), 4),
        **built.compile_facts,
        **measured.extra,
        "how": [stepper.note] if stepper.note else [],
    }
