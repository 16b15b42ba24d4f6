"""What an operand is in FP8, summed in float64, for programs on a GPU; knows nothing of narrowgauge.

    d = codes · scale, by    a copy of the layer's own quantizer of TransformerEngine, so that its history is left alone
                             the formula of `current` where a layer is in high precision: scale = amax / max,
                             codes = float8(x max / amax), max 448 (E4M3) and of gradients 57344 (E5M2)

    numel, amax, l2, mean    of x
    sqnr_db                  10 log10(sum x^2 / sum (x - d)^2)
    scale_min, scale_max     of all scales, of blocks without the padding that TransformerEngine has among theirs
    underflow_pct            of all numbers, those that are not 0 and whose code is
    saturation_pct           delayed: those above the amax that the scale was made from, by more than a millionth
    amax_ratio               delayed: amax / that amax, the newest of the layer's history before this one

Microbatches and the ranks' parts of an operand are quantized one by one: sums add, extremes compete. A layer's own
amax of a step in which it kept its weight in FP8 is 0 and moved no scale, so the newest is the newest that is not 0.

Codes are dequantized into float32. `dequantize()` by itself rounds each value to x's BF16, as no product does, and
where the scale is no power of two that moves the SQNR by up to 0.1 dB (`te_draw`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # of TransformerEngine's blocks, [1, 128] or [128, 128]
SUMMED = ("numel", "total", "xx", "error", "flushed", "saturated")
JUDGED = {"grad_output": (57344.0, torch.float8_e5m2)}  # all else E4M3


class Sums:
    """One operand of one layer in one step."""

    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []

    def add(self, x: Tensor, role: str, quantizer: Any = None, before: float | None = None) -> None:
        """One more; `before`: the amax that a delayed scale was made from."""
        x = x.detach().reshape(-1, x.shape[-1]).contiguous()
        d, scales = judged(x, role) if quantizer is None else coded(x, quantizer)
        wide = x.double()
        amax, beyond = float(wide.abs().max()), (before or torch.inf) * (1 + 2**-20)
        self.parts.append({
            "numel": x.numel(),
            "total": float(wide.sum()),
            "xx": float(wide.square().sum()),
            "error": float((wide - d).square().sum()),
            "amax": amax,
            "flushed": int(((d == 0) & (wide != 0)).sum()),
            "saturated": int((wide.abs() > beyond).sum()),
            "scale_min": float(scales.min()),
            "scale_max": float(scales.max()),
            "ratio": amax / before if before else 0.0,
        })  # fmt: skip


def row(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """By a metric's name."""
    parts = list(parts)
    numel, total, xx, error, flushed, saturated = (sum(part[name] for part in parts) for name in SUMMED)
    amax, scale_max, ratio = (max(part[name] for part in parts) for name in ("amax", "scale_max", "ratio"))
    made = {
        "numel": numel,
        "amax": amax,
        "l2": xx**0.5,
        "mean": total / numel,
        "sqnr_db": 10 * math.log10(xx / error) if error else math.inf,
        "underflow_pct": 100 * flushed / numel,
        "saturation_pct": 100 * saturated / numel,
        "scale_min": min(part["scale_min"] for part in parts),
        "scale_max": scale_max,
    }
    return made | ({"amax_ratio": ratio} if ratio else {})


def worst(found: dict[str, float], want: dict[str, float]) -> float:
    """How far a recorded row is from that by hand: a mean beside a typical number, a share beside all, else itself."""
    size = {name: max(abs(value), 1e-30) for name, value in want.items()}
    size |= {"mean": max(size["mean"], want["l2"] / want["numel"] ** 0.5), "underflow_pct": 100, "saturation_pct": 100}
    gaps = [abs(found[name] - value) / size[name] for name, value in want.items()]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def judged(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
    """By the formula of `current`: d in float64, and the scale."""
    largest, dtype = JUDGED.get(role, (448.0, torch.float8_e4m3fn))
    amax = x.float().abs().max()
    inverse = torch.tensor(largest, device=x.device) / amax  # rounded once
    codes = (x.float() * inverse).clamp(-largest, largest).to(dtype)
    scale = amax.double() / largest
    return codes.double() * scale, scale


def coded(x: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """By a copy of the quantizer: d in float64, and its scales."""
    mine = quantizer.copy()
    if isinstance(getattr(mine, "amax", None), Tensor):
        mine.scale, mine.amax = mine.scale.clone(), mine.amax.clone()
    mine.internal = False
    mine.set_usage(rowwise=True, columnwise=False)
    with torch.no_grad():
        made = mine(x)
        return made.dequantize(dtype=torch.float32).double(), scales_of(made, *x.shape)


def scales_of(made: Any, rows: int, columns: int) -> Tensor:
    """That of the tensor, or those of its blocks: [rows, columns] of them, of [1, 128] turned, padded to fours."""
    if hasattr(made, "_scale_inv"):
        return made._scale_inv
    across = math.ceil(columns / BLOCK)
    down = slice(None, math.ceil(rows / BLOCK)), slice(None, across)
    return made._rowwise_scale_inv[down if made._is_2D_scaled else (slice(None, across), slice(None, rows))]


def own(layer: Any, role: str, gemm: int = 0) -> tuple[Any, float | None]:
    """An operand's quantizer, and the amax before this one's of a delayed scale; nothing of a layer that is high."""
    if not getattr(layer, "fp8", False):
        return None, None
    way, place = ("bwd", 2 * gemm) if role == "grad_output" else ("fwd", 3 * gemm + (role == "weight"))
    history = getattr(layer.fp8_meta[f"scaling_{way}"], "amax_history", None)
    return layer.quantizers[f"scaling_{way}"][place], None if history is None else newest(history[1:, place])


def newest(amaxes: Tensor) -> float:
    """Of a history whose row 0 is being filled, and whose last one is the newest."""
    held = amaxes[amaxes > 0]
    return float(held[-1]) if len(held) else 0.0


def normed(layer: Any, x: Tensor) -> Tensor:
    """What a layer that norms inside multiplies: the formula in float64, rounded to x's precision."""
    with torch.no_grad():
        wide = x.detach().double()
        away = wide - wide.mean(-1, keepdim=True)
        made = away / (away.square().mean(-1, keepdim=True) + layer.eps).sqrt()
        return (made * layer.layer_norm_weight.double() + layer.layer_norm_bias.double()).to(x.dtype)
