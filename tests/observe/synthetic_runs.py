"""Runs as a comparison would leave them, made from formulas: no training, no torch.

28 linear layers (4 blocks of 7), 300 steps, tensors recorded every 10. `layers.2.mlp.down` is sick under delayed
scaling: from step 150 on its gradient outgrows the history (saturation, gain below 1).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.metrics.bins import EXPONENT_BINS, EXPONENT_LOW, RANGE_BINS
from narrowgauge.observe.store import RunWriter

KINDS = {
    "attn.q": (256, 256),
    "attn.k": (128, 256),
    "attn.v": (128, 256),
    "attn.out": (256, 256),
    "mlp.gate": (688, 256),
    "mlp.up": (688, 256),
    "mlp.down": (256, 688),
}
OPERANDS = ("input", "weight", "grad_output")
RESULTS = ("output", "grad_input", "grad_weight")
SICK = "layers.2.mlp.down"
COMMAND = ["train.py", "--steps", "300", "--size", "demo"]


def modules(layers: int = 4) -> list[str]:
    return [f"layers.{i}.{kind}" for i in range(layers) for kind in KINDS]


def losses(variant: str, steps: int) -> np.ndarray:
    """Byte-level loss from 5.55 to about 1.7, paired noise shared by all variants."""
    t = np.arange(1, steps + 1)
    shared = np.random.default_rng(7).normal(0, 0.035, steps)
    base = 1.55 + 4.0 * np.exp(-t / (0.13 * steps)) + 0.35 * np.exp(-t / (0.6 * steps))
    if variant == "baseline":
        return base + shared
    own = np.random.default_rng(sum(map(ord, variant)))
    drift = np.convolve(own.normal(0, 1, steps + 40), np.ones(40) / 40, "valid")[:steps] * 0.012
    bias = {"noise": 0.0, "current": 0.0006, "delayed": 0.014, "blockwise": 0.0003}.get(variant, 0.001)
    late = 1 / (1 + np.exp(-(t - 0.55 * steps) / (0.03 * steps)))
    return base * (1 + bias * (late if variant == "delayed" else 1)) + shared + drift + own.normal(0, 0.003, steps)


def columns(variant: str, names: list[str], role: str, step: int, steps: int, layers: int = 4) -> dict[str, np.ndarray]:
    """Every metric of one role for all modules at one step."""
    rng = np.random.default_rng([step, OPERANDS.index(role), sum(map(ord, variant))])
    depth = np.array([int(n.split(".")[1]) / max(layers - 1, 1) for n in names])
    down = np.array([n.endswith("down") for n in names])
    sick = np.array([n == SICK for n in names]) & (variant == "delayed") & (role == "grad_output") & (step > steps / 2)
    sigma = {
        "input": 0.9 + 0.4 * depth,
        "weight": 0.02 * np.ones_like(depth),
        "grad_output": 2e-4 * (1 + depth) * math.exp(-step / steps),
    }[role]
    sigma = sigma * np.exp(rng.normal(0, 0.06, len(names))) * np.where(down & (role == "input"), 0.5, 1)
    tail = np.where(down & (role == "input"), 14.0, 5.2) * np.exp(rng.normal(0, 0.08, len(names)))
    amax = sigma * tail * np.where(sick, 12.0, 1.0)
    fmt = E5M2 if role == "grad_output" and variant != "blockwise" else E4M3FN
    assumed = amax / np.where(sick, 12.0, 1.0) * (1.15 if variant == "delayed" else 1.0)
    inv_scale = fmt.max / assumed
    if variant == "blockwise":
        inv_scale = 2.0 ** np.floor(np.log2(inv_scale * 1.8))
    spread = np.where(role == "grad_output", 3.2, 1.0) * (1 + 0.8 * (depth > 0.9))
    exponents = np.arange(EXPONENT_LOW, EXPONENT_LOW + EXPONENT_BINS - 1, dtype=float)
    numel = 8192 * np.array([KINDS[n.split(".", 2)[2]][1] for n in names])
    histogram = np.stack(
        [
            _histogram(s * (8 if bad else 1), w, n, exponents)
            for s, w, bad, n in zip(sigma, np.broadcast_to(spread, sigma.shape), sick, numel, strict=True)
        ]
    )
    edges = exponents[None, :] + np.log2(inv_scale)[:, None] + 0.5
    counts = histogram[:, 1:]
    underflow = 100 * (counts * (edges < math.log2(fmt.flush_below))).sum(1) / counts.sum(1)
    saturation = np.where(sick, 21.0 + rng.normal(0, 2, len(names)), 0.0)
    base_db = 31.5 if fmt is E4M3FN else 25.6
    sqnr = base_db - 0.09 * underflow - np.where(sick, 17.0, 0.0) + rng.normal(0, 0.12, len(names))
    gain = 1 - np.where(sick, 0.22, 0.0) - 0.0002 * underflow + rng.normal(0, 3e-4, len(names))
    return {
        "numel": numel,
        "amax": amax,
        "amin": sigma * 1e-6,
        "mean": sigma * 0.01,
        "std": sigma,
        "l2": sigma * np.sqrt(numel),
        "nan_count": np.zeros(len(names), int),
        "inf_count": np.zeros(len(names), int),
        "underflow_pct": underflow,
        "saturation_pct": saturation,
        "mse": sigma**2 * 10 ** (-sqnr / 10),
        "sqnr_db": sqnr,
        "cosine": 1 - 0.5 * 10 ** (-sqnr / 10),
        "gain": gain,
        "lost_energy_pct": underflow * 1e-4,
        "p5_row_sqnr_db": sqnr - 0.6,
        "p5_col_sqnr_db": sqnr - np.where(down & (role == "input"), 9.0, 0.8),
        "kurtosis": 3 + (tail - 5) * 2,
        "exponent_histogram": histogram,
        "block_range_histogram": np.tile((1e4 * np.exp(-np.arange(RANGE_BINS) / 3)).astype(np.int64), (len(names), 1)),
        "scale_min": 1 / inv_scale / (8 if variant == "blockwise" else 1),
        "scale_max": 1 / inv_scale,
        "scale_std": np.zeros(len(names)),
        "amax_ratio": amax / assumed if variant == "delayed" else amax * np.nan,
    }


def _histogram(sigma: float, width: float, n: float, exponents: np.ndarray) -> np.ndarray:
    """Counts per binade of a Gaussian whose lower tail is `width` times as long."""
    z = 2.0**exponents / sigma
    density = z * np.exp(-(z**2) / 2)
    density = np.where(z < 1, density ** (1 / width) * 0.6065 ** (1 - 1 / width), density)
    counts = np.concatenate([[0.002], density / density.sum()]) * n
    return np.rint(counts).astype(np.int64)


def conversion(names: list[str], recipe: str, calls: int) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        n, k = KINDS[name.split(".", 2)[2]]
        rows.append(
            {
                "name": name,
                "shape": [n, k],
                "recipe": recipe,
                "reason": "rule matmul",
                "backend": "reference",
                "flops_per_token": 6 * n * k,
                "calls": calls,
                "aliases": [],
                "shared_with": [],
            }
        )
    rows.append(
        {
            "name": "adapter",
            "shape": [64, 256],
            "recipe": recipe,
            "reason": "rule matmul",
            "backend": "reference",
            "flops_per_token": 6 * 64 * 256,
            "calls": 0,
            "aliases": [],
            "shared_with": [],
        }
    )
    rows.append(
        {
            "name": "lm_head",
            "shape": [256, 256],
            "recipe": None,
            "reason": "lm_head stays high by default",
            "backend": None,
            "flops_per_token": 6 * 256 * 256,
            "calls": None,
            "aliases": [],
            "shared_with": [],
        }
    )
    return rows


def write_run(
    path: Path,
    variant: str,
    *,
    steps: int = 300,
    every: int = 10,
    layers: int = 4,
    tensors: bool = True,
    loss: np.ndarray | None = None,
    status: str | None = "complete",
    names: list[str] | None = None,
    **meta: Any,
) -> Path:
    """One run folder. `status=None` leaves it as a killed process would. `loss` replaces the synthetic one."""
    fp8 = variant not in ("baseline", "noise")
    names = names or modules(layers)
    gradients = "E4M3FN" if variant == "blockwise" else "E5M2"
    facts = {
        "command": COMMAND,
        "git_revision": "a1b2c3d",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "narrowgauge": "0.1.0"},
        "hardware": "Synthetic CPU, 2 threads",
        "device": "cpu",
        "recipe": variant if fp8 else None,
        "variant": variant,
        "conversion": conversion(modules(layers), variant, steps) if fp8 else [],
        "seeds": {"all": 1234},
        "weights_hash": "5d0c9a7e11f2b360",
        "data_hash": "3b6f20c4d8e19a55",
        "baseline_dtype": "bf16 autocast",
        "emulated": True,
        "watch": {"every": every, "seconds": 3.21},
        "notes": [],
        "exit_code": 0,
        "error": "",
        "noise": 1e-2 if variant == "noise" else 0.0,
        **({"formats": {"input": "E4M3FN", "weight": "E4M3FN", "grad_output": gradients}} if fp8 else {}),
        **meta,
    }
    writer = RunWriter(path, facts)
    values = losses(variant, steps) if loss is None else loss
    for step in range(1, len(values) + 1):
        loss_now = float(values[step - 1])
        writer.add_scalars(
            step,
            loss=loss_now,
            grad_norm=1.0 + 3 * math.exp(-step / 40),
            lr=3e-4,
            tokens=8192.0,
            step_seconds=0.21 * (2.6 if fp8 else 1.0),
            peak_memory_bytes=1.4e9,
            microbatches=4.0,
            skipped=0.0,
            nonfinite=float(not math.isfinite(loss_now)),
        )
        if not math.isfinite(loss_now):
            writer.add_event(step, "nan", "loss is not finite")
        if step % 100 == 0:
            writer.add_scalars(step, eval_loss=loss_now + 0.02)
        if fp8 and tensors and (step == 1 or step % every == 0):
            for role in OPERANDS:
                writer.add_tensors(
                    step, [f"{n}:{role}" for n in names], columns(variant, modules(layers), role, step, steps, layers)
                )
            for role in RESULTS:
                ones = np.ones(len(names))
                writer.add_tensors(
                    step,
                    [f"{n}:{role}" for n in names],
                    {
                        "amax": ones * 4,
                        "std": ones,
                        "gemm_gain": ones * 0.9998,
                        "gemm_cosine": ones * 0.9993,
                        "gemm_sqnr_db": ones * 28.4,
                    },
                )
    writer.flush()
    if status:
        writer.close(status)
    return path


def write_all(root: Path, **kwargs: Any) -> dict[str, Path]:
    """Baseline, noise twin and three variants below `root`, by name."""
    return {
        name: write_run(root / name, name, **kwargs)
        for name in ("baseline", "noise", "current", "delayed", "blockwise")
    }
