"""How near the quantize kernels come to the memory's own speed on this GPU.

share = (bytes read + bytes written) / seconds / (the same for a plain copy)        medians, taken in turn

python -m benchmarks.gpu_bench_quantize [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.record import record

from narrowgauge.compute.kernels.fused import amax, blocks, rows, tensorwise
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, ROWWISE, PerTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN

SHAPES = ((8192, 4096), (8192, 14336), (4096, 14336), (8192, 2048))


def milliseconds(call: Callable[[], object], flush: torch.Tensor) -> float:
    """One call, with a cold cache."""
    flush.zero_()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def calls(x: torch.Tensor) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name -> (bytes moved per element of x, the call)."""
    copy, one = torch.empty_like(x), torch.ones((), device=x.device)
    rule, scratch = Operand(E4M3FN, PerTensor(), CURRENT), torch.zeros(2, dtype=torch.int32, device=x.device)
    given = partial(tensorwise.cast_given, x, rule, one, one, scratch=scratch)
    return {
        "copy": (4, partial(copy.copy_, x)),
        "amax": (2, partial(amax.amax, x)),
        "tensor, both": (4, partial(tensorwise.cast, x, rule, one)),
        "tensor, plain": (3, partial(tensorwise.cast, x, rule, one, turned=False)),
        "tensor, turned": (3, partial(tensorwise.cast, x, rule, one, plain=False)),
        "given scale and amax, both": (4, given),
        "given scale and amax, plain": (3, partial(given, turned=False)),
        "given scale and amax, turned": (3, partial(given, plain=False)),
        "tiles, both": (4, partial(blocks.cast_tiles, x, E4M3FN, CURRENT_POW2)),
        "tiles, plain": (3, partial(blocks.cast_tiles, x, E4M3FN, CURRENT_POW2, turned=False)),
        "squares, both": (4, partial(blocks.cast_squares, x, E4M3FN, CURRENT_POW2)),
        "rows, both": (6, partial(rows.cast_rows, x, E4M3FN, ROWWISE)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    flush = torch.empty(128 << 20, dtype=torch.int32, device="cuda")  # more than any cache holds
    table = []
    for M, K in SHAPES:
        x = torch.randn(M, K, device="cuda").bfloat16()
        found: dict[str, list[float]] = {}
        for round_ in range(args.rounds + 3):
            for name, (_, call) in calls(x).items():
                took = milliseconds(call, flush)
                if round_ >= 3:
                    found.setdefault(name, []).append(took)
        taken = {name: statistics.median(times) for name, times in found.items()}
        speed = {name: moved * x.numel() / taken[name] / 1e9 for name, (moved, _) in calls(x).items()}
        for name, tb_s in speed.items():
            row = {"shape": f"{M}x{K}", "what": name, "us": round(1e3 * taken[name], 1)}
            table.append(row | {"TB/s": round(tb_s, 2), "% of copy": round(100 * tb_s / speed["copy"], 1)})
    record("quantize", {"rounds": args.rounds, "dtype": "bfloat16"}, table)


if __name__ == "__main__":
    main()
