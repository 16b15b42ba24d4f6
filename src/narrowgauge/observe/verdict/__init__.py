"""Judging FP8 runs against their baseline twin."""

from narrowgauge.observe.verdict.evidence import Evidence
from narrowgauge.observe.verdict.judge import judge
from narrowgauge.observe.verdict.types import (
    Answer,
    Outcome,
    SameWeights,
    TwinFacts,
    VariantVerdict,
    Verdict,
    WorstTensor,
)

__all__ = [
    "Answer",
    "Evidence",
    "Outcome",
    "SameWeights",
    "TwinFacts",
    "VariantVerdict",
    "Verdict",
    "WorstTensor",
    "judge",
]
