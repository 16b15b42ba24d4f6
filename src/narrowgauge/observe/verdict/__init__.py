"""Judging FP8 runs against their baseline twin."""

from narrowgauge.observe.verdict.types import (
    Answer,
    Outcome,
    SameWeights,
    TwinFacts,
    VariantVerdict,
    Verdict,
    WorstTensor,
)

__all__ = ["Answer", "Outcome", "SameWeights", "TwinFacts", "VariantVerdict", "Verdict", "WorstTensor"]
