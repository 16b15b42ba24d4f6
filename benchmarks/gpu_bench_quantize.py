"""How near the quantize kernels come to the memory's own speed on this GPU.

share = (bytes read + bytes written) / seconds / (the same for a plain copy)        medians, taken in turn

Before each call the cache is filled with numbers of another tensor that were only read: written ones would have to go
to memory first, at the expense of the call that is timed. Times are those between two events, on a GPU that is kept
busy until the host has launched the call. Rows alone are held whole by a program, and read once.

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
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, ROWWISE, BLOCK_1x128, BLOCK_128x128, PerRow, PerTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN

TILES, SQUARES = (Operand(E4M3FN, granules, CURRENT_POW2) for granules in (BLOCK_1x128, BLOCK_128x128))
ROWS = Operand(E4M3FN, PerRow(), ROWWISE)
SHAPES = ((8192, 4096), (8192, 14336), (4096, 14336), (8192, 2048))


def milliseconds(call: Callable[[], object], flush: torch.Tensor) -> float:
    """One call, with a cache that holds only clean lines of another tensor, while the host is ahead."""
    flush.amax()
    torch.cuda._sleep(1_000_000)
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
    found: dict[str, tuple[float, Callable[[], object]]] = {
        "copy": (4, partial(copy.copy_, x)),
        "amax": (2, partial(amax.amax, x)),
        "amax, then tensor, both": (6, lambda: tensorwise.cast(x, rule, amax.amax(x))),
    }
    for layout, moved, wanted in (("both", 4, (True, True)), ("plain", 3, (True, False)), ("turned", 3, (False, True))):
        found |= {
            f"tensor, {layout}": (moved, partial(tensorwise.Cast(x, rule, *wanted), x, one)),
            f"given and amax, {layout}": (
                moved, partial(tensorwise.CastGiven(x, rule, *wanted, False), x, one, one, None, scratch)
            ),
            f"tiles, {layout}": (moved, partial(blocks.TileCast(x, TILES, *wanted), x)),
            f"squares, {layout}": (moved, partial(blocks.SquareCast(x, SQUARES, *wanted), x)),
            f"rows, {layout}": (moved if layout == "plain" else moved + 2, partial(rows.RowCast(x, ROWS, *wanted), x)),
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="no GPU here, so nothing was measured\n")
    flush = torch.ones(128 << 20, dtype=torch.int32, device="cuda")  # more than any cache holds
    table = []
    for M, K in SHAPES:
        x = torch.randn(M, K, device="cuda").bfloat16()
        found: dict[str, list[float]] = {}
        these = calls(x)
        for round_ in range(args.rounds + 3):
            for name, (_, call) in these.items():
                took = milliseconds(call, flush)
                if round_ >= 3:
                    found.setdefault(name, []).append(took)
        taken = {name: statistics.median(times) for name, times in found.items()}
        speed = {name: moved * x.numel() / taken[name] / 1e9 for name, (moved, _) in these.items()}
        for name, tb_s in speed.items():
            row = {"shape": f"{M}x{K}", "what": name, "us": round(1e3 * taken[name], 1)}
            table.append(row | {"TB/s": round(tb_s, 2), "% of copy": round(100 * tb_s / speed["copy"], 1)})
    record("quantize", {"rounds": args.rounds, "dtype": "bfloat16"}, table)


if __name__ == "__main__":
    main()
