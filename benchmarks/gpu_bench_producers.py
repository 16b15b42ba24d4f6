"""What it gains to quantize SwiGLU, its gradient and RMSNorm where they are computed.

delayed   a scale is given    fused: codes of both layouts and the amax from one kernel
                              cast: the compiled producer, then `tensorwise.cast_given`
current   no scale yet        fused: y and its amax from one kernel, then `tensorwise.cast`
                              amax, cast: the compiled producer, the amax, the cast
                              amax in graph, cast: the compiled producer makes the amax too, then the cast

A norm alone is one row. What a step gains counts "add and norm": in a model a compiler merges the norm with the sum
before it, and a kernel of our own leaves it the sum alone. Medians of calls taken in turn, each with a cold, clean
cache and a host that is ahead. `bytes` are those that have to be moved per element of y.

python -m benchmarks.gpu_bench_producers [--rounds 20] [--sweep]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.producers import norm, swiglu
from benchmarks.producers.pieces import Launch, Made
from benchmarks.record import record
from torch import Tensor

from narrowgauge.compute.kernels.both import Given
from narrowgauge.compute.kernels.fused import amax, tensorwise
from narrowgauge.compute.nn.tracing.in_graph import amax_of
from narrowgauge.compute.quant import CURRENT, PerTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN, E5M2

EPS = 1e-5
E4M3_RULE, E5M2_RULE = (Operand(fmt, PerTensor(), CURRENT) for fmt in (E4M3FN, E5M2))
WAYS = (
    ("delayed", "fused"),
    ("delayed", "cast"),
    ("current", "fused"),
    ("current", "amax, cast"),
    ("current", "amax in graph, cast"),
)
PER_LAYER = {"swiglu": 1, "swiglu gradient": 1, "add and norm": 2}
SWEEP = {
    "swiglu": [Launch(128, 128, 8, 128), Launch(128, 64, 4, 128), Launch(64, 64, 4, 64), Launch(128, 32, 4, 64)],
    "swiglu gradient": [Launch(64, 64, 4, 128), Launch(128, 32, 4, 128), Launch(128, 64, 8, 128)],
    "norm": [Launch(32, 128, 8, 64), Launch(16, 256, 8, 64), Launch(16, 512, 8, 128), Launch(64, 128, 8, 128)],
}


class Model(NamedTuple):
    name: str
    tokens: int
    dim: int
    ffn: int
    layers: int


MODELS = (Model("8b-slice", 8192, 4096, 14336, 8), Model("1b", 8192, 2048, 8192, 16))


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def plain_gradient(gate_up: Tensor, dy: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.cat((torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)), -1)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def add_and_norm(h: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = h + more
    return F.rms_norm(h, weight.shape, weight, EPS), h


def add(h: Tensor, more: Tensor) -> Tensor:
    return h + more


def with_amax(producer: Callable[..., Any]) -> Callable[..., Any]:
    """The producer, and the amax of y in the same graph."""

    def both(*inputs: Tensor) -> tuple[Any, Tensor]:
        made = producer(*inputs)
        return made, amax_of(first(made))

    return both


def first(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple) else made


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def milliseconds(call: Callable[[], object], flush: Tensor) -> float:
    """One call, with a cache that holds only clean lines of another tensor, while the host is ahead."""
    flush.amax()
    torch.cuda._sleep(1_000_000)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


class Case(NamedTuple):
    """One producer at one shape.

    `plain` is what is compiled, and returns y or a tuple that begins with it; `given` and `alone` are ours: codes under
    a scale, and y with its amax. `moved` are bytes per element of y, in the order of WAYS; `numel` counts elements.
    """

    name: str
    rule: Operand
    numel: int
    inputs: tuple[Tensor, ...]
    plain: Callable[..., Any]
    given: Callable[..., Made]
    alone: Callable[[], tuple[Tensor, ...]]
    moved: tuple[int, ...]


def cases(model: Model) -> list[Case]:
    """Every producer of a layer; what it reads has the size that it has in training."""
    M, K, N = model.tokens, model.dim, model.ffn
    gate_up, dy, x, more = (torch.randn(M, n, device="cuda").bfloat16() for n in (2 * N, N, K, K))
    weight = torch.randn(K, device="cuda").bfloat16()
    summed = compiled(add)

    def norm_given(x: Tensor, using: Given, **wanted: Any) -> Made:
        return norm.rms_norm_given(x, weight, EPS, E4M3_RULE, using, **wanted)[0]

    return [
        Case(
            "swiglu", E4M3_RULE, M * N, (gate_up,), plain_swiglu,
            partial(swiglu.swiglu_given, gate_up, E4M3_RULE), partial(swiglu.swiglu_amax, gate_up),
            (6, 10, 10, 12, 10),
        ),
        Case(
            "swiglu gradient", E5M2_RULE, M * N, (gate_up, dy), plain_gradient,
            partial(swiglu.swiglu_grad_given, gate_up, dy, E5M2_RULE), partial(swiglu.swiglu_grad_amax, gate_up, dy),
            (10, 18, 18, 22, 18),
        ),
        Case(
            "norm", E4M3_RULE, M * K, (x, weight), plain_norm,
            partial(norm_given, x), partial(norm.rms_norm_amax, x, weight, EPS),
            (4, 8, 8, 10, 8),
        ),
        Case(
            "add and norm", E4M3_RULE, M * K, (x, more, weight), add_and_norm,
            lambda using, **wanted: norm_given(summed(x, more), using, **wanted),
            lambda: norm.rms_norm_amax(summed(x, more), weight, EPS),
            (10, 12, 14, 14, 12),
        ),
    ]  # fmt: skip


def calls(case: Case) -> dict[tuple[str, str], Callable[[], object]]:
    """(scaling, way) -> the call; both layouts, and the amax that the next steps need."""
    rule, using, inputs = case.rule, given_scale(), case.inputs
    plain, and_amax = compiled(case.plain), compiled(with_amax(case.plain))
    slot = using.slot.view(torch.int32)

    def cast_given() -> object:
        y = first(plain(*inputs))
        return tensorwise.cast_given(y, rule, using.scale, using.inv_scale, slot=slot, scratch=using.scratch)

    def amax_and_cast() -> object:
        y = first(plain(*inputs))
        return tensorwise.cast(y, rule, amax.amax(y))

    def amax_in_graph() -> object:
        made, largest = and_amax(*inputs)
        return tensorwise.cast(first(made), rule, largest)

    def fused_and_cast() -> object:
        y, largest, *_ = case.alone()
        return tensorwise.cast(y, rule, largest)

    return dict(
        zip(WAYS, (partial(case.given, using), cast_given, fused_and_cast, amax_and_cast, amax_in_graph), strict=True)
    )


def given_scale() -> Given:
    scale = torch.tensor(0.01, device="cuda")
    slot, scratch = torch.full((1,), -1.0, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    return Given(scale, 1 / scale, slot, scratch)


def check(case: Case) -> float:
    """Percent of y that is the compiled producer's to the last bit; an end where codes are not those of y."""
    using = given_scale()
    made = case.given(using, high=True)
    want = tensorwise.cast_given(made.high, case.rule, using.scale, using.inv_scale)
    for found, right in zip((made.plain, made.turned, made.scale, made.amax), want, strict=True):
        if not torch.equal(found.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)):
            raise SystemExit(f"{case.name}: what the fused kernel wrote is not the cast of its y")
    return 100 * (made.high == first(compiled(case.plain)(*case.inputs))).float().mean().item()


def medians(these: dict[Any, Callable[[], object]], rounds: int, flush: Tensor) -> dict[Any, float]:
    """Milliseconds of each, taken in turn."""
    found: dict[Any, list[float]] = {key: [] for key in these}
    for round_ in range(rounds + 3):
        for key, call in these.items():
            took = milliseconds(call, flush)
            if round_ >= 3:
                found[key].append(took)
    return {key: statistics.median(times) for key, times in found.items()}


def row(model: Model, what: str, way: tuple[str, str], ms: float, numel: int, moved: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": model.name, "producer": what, "scaling": way[0], "way": way[1]}
    facts |= {"ms": round(ms, 4), "bytes": moved, "MB": round(moved * numel / 1e6)}
    return facts | {"TB/s": round(moved * numel / ms / 1e9, 2), "y as compiled %": ""}


def measure(model: Model, args: argparse.Namespace, flush: Tensor) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows of a model; per scaling and producer, what all its layers would gain against the best other way."""
    torch.compiler.reset()
    source = torch.randn(model.tokens, model.ffn, device="cuda").bfloat16()
    copy = torch.empty_like(source)
    ms = medians({0: partial(copy.copy_, source)}, args.rounds, flush)[0]
    table, gained = [row(model, "copy", ("", ""), ms, copy.numel(), 4)], {"delayed": {}, "current": {}}
    for case in cases(model):
        equal = check(case)
        took = medians(calls(case), args.rounds, flush)
        for way, moved in zip(WAYS, case.moved, strict=True):
            table.append(row(model, case.name, way, took[way], case.numel, moved))
        table[-len(WAYS)]["y as compiled %"] = round(equal, 3)
        for scaling, gains in gained.items():
            others = [took[way] for way in WAYS if way[0] == scaling and way[1] != "fused"]
            each = min(others) - took[scaling, "fused"]
            if case.name in PER_LAYER:
                gains[case.name] = round(each * model.layers * PER_LAYER[case.name], 3)
        for launch in SWEEP.get(case.name, ()) if args.sweep else ():
            ms = medians({launch: partial(case.given, given_scale(), launch=launch)}, args.rounds, flush)[launch]
            table.append(row(model, case.name, ("delayed", f"fused, {tuple(launch)}"), ms, case.numel, case.moved[0]))
    return table, gained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="also try other tiles")
    args = parser.parse_args()
    flush = torch.ones(128 << 20, dtype=torch.int32, device="cuda")  # more than any cache holds
    table, gained, begin = [], {}, time.perf_counter()
    for model in MODELS:
        rows, gained[model.name] = measure(model, args, flush)
        table += rows
    settings = {"rounds": args.rounds, "dtype": "bfloat16", "seconds": round(time.perf_counter() - begin)}
    record("producers", settings | {"ms_gained_per_step": gained}, table)
    for model in MODELS:
        for scaling, gains in gained[model.name].items():
            every, worth = sum(gains.values()), sum(max(0.0, gain) for gain in gains.values())
            each = ", ".join(f"{name} {gain:+.2f}" for name, gain in gains.items())
            print(
                f"{model.name}, {scaling}: the step of {model.layers} layers would gain {every:.2f} ms "
                f"if all is fused, {worth:.2f} ms if only what gains is: {each}"
            )


if __name__ == "__main__":
    main()
