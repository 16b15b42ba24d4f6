"""What watching a quantize kernel costs on this GPU: the plain kernel, and the same with all moments.

share = (bytes read + bytes written by the cast) / seconds / (the same for a plain copy)      medians, taken in turn

Rows read twice: their amaxes are a launch of their own.

python -m benchmarks.gpu_bench_looks [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from benchmarks.record import record

from narrowgauge.compute.kernels.fused import amax, blocks, rows, tensorwise
from narrowgauge.compute.kernels.fused.watched import blocks as watched_blocks
from narrowgauge.compute.kernels.fused.watched import looks, plan
from narrowgauge.compute.kernels.fused.watched import rows as watched_rows
from narrowgauge.compute.kernels.fused.watched import tensorwise as watched_tensorwise
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, ROWWISE, BLOCK_1x128, BLOCK_128x128, PerRow, PerTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN

SHAPES = ((8192, 4096), (8192, 14336), (4096, 14336), (28672, 4096))
SHARES = (1, 3, 7, 13, 31, 61)
STEP = 96  # looks of a model of 32 layers
RULE = Operand(E4M3FN, PerTensor(), CURRENT)
GRAINS = {
    "tiles": (Operand(E4M3FN, BLOCK_1x128, CURRENT_POW2), blocks.cast_tiles, watched_blocks.cast_tiles),
    "squares": (Operand(E4M3FN, BLOCK_128x128, CURRENT_POW2), blocks.cast_squares, watched_blocks.cast_squares),
    "rows": (Operand(E4M3FN, PerRow(), ROWWISE), rows.cast_rows, watched_rows.cast_rows),
}


def milliseconds(call: Callable[[], object], flush: torch.Tensor) -> float:
    """One call, with a cold cache, while the host is ahead of the device."""
    flush.zero_()
    torch.cuda._sleep(1_500_000)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@contextmanager
def share_of(share: int) -> Iterator[None]:
    """Looks that compare another share of the rows with their codes."""
    before = plan.SHARE, plan.COMPARED
    plan.SHARE, plan.COMPARED = share, 1 << 30
    plan.Plan.of.cache_clear()
    try:
        yield
    finally:
        plan.SHARE, plan.COMPARED = before
        plan.Plan.of.cache_clear()


def calls(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is compared, by name."""
    copy, known, scratch = torch.empty_like(x), amax.amax(x), torch.zeros(2, dtype=torch.int32, device=x.device)
    scale, inv_scale = known / 448, 448 / known
    found: dict[str, Callable[[], object]] = {
        "copy": partial(copy.copy_, x),
        "current, plain kernel": partial(tensorwise.cast, x, RULE, known),
        "given scale and amax, plain kernel": partial(
            tensorwise.cast_given, x, RULE, scale, inv_scale, scratch=scratch
        ),
    }
    for share in SHARES:
        with share_of(share):
            look = looks.Looks(x.device).open("", x, RULE, 1)
        assert look is not None
        found[f"current, watched, errors of 1/{share}"] = partial(watched_tensorwise.cast, x, RULE, known, look=look)
        found[f"given scale and amax, watched, errors of 1/{share}"] = partial(
            watched_tensorwise.cast_given, x, RULE, scale, inv_scale, look=look, scratch=scratch
        )
    for name, (rule, plain, watched) in GRAINS.items():
        for turned, codes in ((True, ""), (False, ", rows of codes alone")):
            look = looks.Looks(x.device).open("", x, rule, 1, turned)
            assert look is not None
            found[f"{name}{codes}, plain kernel"] = partial(plain, x, rule, turned=turned)
            found[f"{name}{codes}, watched"] = partial(watched, x, rule, look=look, turned=turned)
    return found


def packing(x: torch.Tensor) -> tuple[Callable[[], object], float]:
    """Packing a step's looks, and the MiB that they take."""
    room, known = looks.Looks(x.device), amax.amax(x)
    for i in range(STEP):
        look = room.open(str(i), x, RULE, i)
        assert look is not None
        watched_tensorwise.cast(x, RULE, known, look=look)
    return room.pack, sum(chunk.nbytes for chunk in room._chunks) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="no GPU here, so nothing was measured\n")
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")  # more than any cache holds
    table = []
    for M, K in SHAPES:
        x = torch.randn(M, K, device="cuda").bfloat16()
        pack, mebibytes = packing(x)
        every = calls(x) | {f"pack of {STEP} looks": pack}
        found: dict[str, list[float]] = {}
        for round_ in range(args.rounds + 3):
            for name, call in every.items():
                took = milliseconds(call, flush)
                if round_ >= 3:
                    found.setdefault(name, []).append(took)
        taken = {name: statistics.median(times) for name, times in found.items()}
        for name, ms in taken.items():
            row = {"shape": f"{M}x{K}", "what": name, "us": round(1e3 * ms, 1)}
            if name.startswith("pack"):
                row |= {"TB/s": "", "% of copy": "", "MiB": round(mebibytes, 1)}
            else:
                moved = 3 if "alone" in name else 6 if name.startswith("rows") else 4  # bytes per number
                row["TB/s"] = round(moved * x.numel() / ms / 1e9, 2)
                row["% of copy"] = round(25 * moved * taken["copy"] / ms, 1)
            table.append(row)
    record("looks", {"rounds": args.rounds, "dtype": "bfloat16", "looks": STEP}, table)


if __name__ == "__main__":
    main()
