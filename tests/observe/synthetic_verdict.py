"""A verdict on the synthetic runs: one variant undecided, one unsafe, one safe."""

from __future__ import annotations

from typing import Any

import numpy as np
from synthetic_runs import SICK, conversion, modules

from narrowgauge.observe.verdict.types import SameWeights, TwinFacts, VariantVerdict, Verdict, WorstTensor

UNKNOWN = (
    "Not known yet: the loss gap of +0.11% is inside the noise band of ±0.24% at 300 steps. At the same weights the "
    "loss differs by 0.02% and gradients agree to a cosine of 0.9989, which is healthy."
)
UNSAFE = (
    "Not safe: the loss is 1.37% higher than the baseline's, well outside the noise band of ±0.24%. The gradient of "
    "layers.2.mlp.down saturates from step 150 on."
)
SAFE = "Safe at 300 steps: the loss gap of +0.05% is within 0.25%, and so is the edge of the noise band."


def same_weights(variant: str, steps: int, layers: int = 4) -> tuple[SameWeights, ...]:
    rng = np.random.default_rng(sum(map(ord, variant)))
    worse = {"delayed": 2.2, "blockwise": 0.8}.get(variant, 1.0)
    measured = []
    for step in (1, steps // 2, steps):
        errors = [
            (f"{n}.weight", float(rng.uniform(0.03, 0.09) * worse * (4 if n == SICK and worse > 2 else 1)))
            for n in modules(layers)
        ]
        errors.sort(key=lambda item: -item[1])
        rows = tuple((name, 1 - error**2 / 2, error) for name, error in errors)
        measured.append(
            SameWeights(
                step, 5.5 - 3.6 * step / max(steps, 1), 0.021 * worse, 1 - 0.0011 * worse**2, 1 - 0.001 * worse, rows
            )
        )
    return tuple(measured)


def variant(name: str, steps: int = 300, **changes: Any) -> VariantVerdict:
    facts: dict[str, dict[str, Any]] = {
        "current": {
            "outcome": "inconclusive",
            "safe": "unknown",
            "gap_pct": 0.11,
            "eval_gap_pct": 0.08,
            "sentence": UNKNOWN,
            "next_step": "Run 1,200 steps or more: the band shrinks with the length of the run.",
        },
        "delayed": {
            "outcome": "fail",
            "safe": "no",
            "gap_pct": 1.37,
            "eval_gap_pct": 1.52,
            "sentence": UNSAFE,
            "next_step": "Use current scaling, or give delayed a margin of 2.",
        },
        "blockwise": {
            "outcome": "pass",
            "safe": "yes",
            "gap_pct": 0.05,
            "eval_gap_pct": -0.03,
            "sentence": SAFE,
            "next_step": "Measure the speed on a GPU with FP8.",
        },
    }
    sick = WorstTensor(
        f"{SICK}:grad_output",
        "saturation_pct",
        21.3,
        "21.3% of its elements exceed the format's range: the scale is too small for it.",
        "current scaling, or a margin",
    )
    plain = tuple(
        WorstTensor(
            f"layers.{i}.{kind}",
            "p5_col_sqnr_db",
            16.4 + i,
            f"The worst twentieth of its channels is represented at {16.4 + i:.1f} dB or less: outlier channels.",
            "blockwise scaling",
        )
        for i, kind in (
            (3, "mlp.down:input"),
            (1, "mlp.down:input"),
            (3, "attn.q:grad_output"),
            (0, "mlp.up:grad_output"),
        )
    )
    tail = WorstTensor(
        "layers.0.attn.v:weight",
        "sqnr_db",
        31.2,
        "Healthy: 31.2 dB of signal over quantization noise, among the lowest; no sign of trouble.",
        "nothing to do",
    )
    base: dict[str, Any] = {
        "name": name,
        "recipe": name,
        "worth_it": "unknown",
        "steps": steps,
        "band_pct": 0.24,
        "window": (steps - steps // 4 + 1, steps),
        "same_weights": same_weights(name, steps),
        "eval_name": "eval loss",
        "eval_band_pct": 0.31,
        "eval_value": 1.742,
        "step_seconds": 0.546,
        "tokens_per_second": 15003.0,
        "peak_memory_bytes": 1_402_000_000,
        "flop_share_pct": 87.3,
        "linear_share_pct": 96.1,
        "watch_pct": 4.2,
        "worst": (sick, *plain) if name == "delayed" else (*plain, tail),
        "conversion": tuple(conversion(modules(), name, steps)),
    }
    return VariantVerdict(
        **{
            **base,
            **facts.get(name, {"outcome": "unjudged", "safe": "unknown", "sentence": "", "next_step": ""}),
            **changes,
        }
    )


def verdict(steps: int = 300, **changes: Any) -> Verdict:
    twin = TwinFacts("baseline", "bf16 autocast", steps, 1.7321, 1.7412, 0.21, 39010.0, 1_383_000_000)
    base: dict[str, Any] = {
        "command": "train.py --steps 300 --size demo",
        "steps": steps,
        "judged": True,
        "why_not": "",
        "emulated": True,
        "hardware": "Synthetic CPU, 2 threads",
        "baseline": twin,
        "noise": TwinFacts("noise", "bf16 autocast", steps, 1.7338, 1.7401, 0.211, 38900.0, 1_383_000_000),
        "variants": (variant("current", steps), variant("delayed", steps), variant("blockwise", steps)),
        "notes": ("The program calls torch.compile; it ran eager in every variant.",),
        "versions": {"python": "3.11.9", "torch": "2.13.0", "narrowgauge": "0.1.0"},
        "started": "2026-05-04T12:30:00.000+00:00",
    }
    return Verdict(**{**base, **changes})
