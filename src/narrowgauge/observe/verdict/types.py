"""What a comparison concluded, as frozen data that survives a round trip through JSON.

A verdict never holds a tensor or a path of the machine that made it, so the file can be sent to anyone.

Units: every `*_pct` is a percentage of the baseline's own value, positive when the variant is *worse* (higher loss);
seconds for times, bytes for memory, one step = one optimizer update.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "watch", "fail", "inconclusive", "unjudged"]
Answer = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class SameWeights:
    """FP8 against the baseline at the same weights, batch and random state: no training noise in it."""

    step: int
    loss: float  # the baseline's loss on that microbatch
    loss_gap_pct: float
    grad_cosine: float  # over all parameters, flattened into one vector
    grad_norm_ratio: float  # variant / baseline
    layers: tuple[tuple[str, float, float], ...] = ()  # (parameter, cosine, relative error), worst first


@dataclass(frozen=True)
class WorstTensor:
    """One of the tensors that lose most in FP8, and the number that says so."""

    site: str  # "module:role"
    metric: str
    value: float
    why: str  # one sentence
    remedy: str


@dataclass(frozen=True)
class VariantVerdict:
    """One FP8 variant against the baseline."""

    name: str
    recipe: str
    outcome: Outcome
    safe: Answer
    worth_it: Answer
    sentence: str  # safe or not, worth it or not, in plain words
    next_step: str  # what to try next
    steps: int = 0
    gap_pct: float | None = None  # paired loss gap, mean over the last quarter
    band_pct: float | None = None  # the noise twin's own gap over the same steps
    window: tuple[int, int] | None = None  # the steps that the gap was taken over
    same_weights: tuple[SameWeights, ...] = ()
    same_weights_note: str = ""  # why there is no such measure, if there is none
    eval_name: str = ""  # "eval loss"; "" when the script never evaluated
    eval_gap_pct: float | None = None
    eval_band_pct: float | None = None
    eval_value: float | None = None
    step_seconds: float | None = None
    speedup: float | None = None  # baseline step time / this one's; None where FP8 was emulated
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    flop_share_pct: float | None = None  # share of the model's matmul FLOPs that ran in FP8
    linear_share_pct: float | None = None  # share of the nn.Linear FLOPs that were converted
    nan_steps: int = 0
    skipped_steps: int = 0
    watch_pct: float | None = None  # by how much longer the steps took for being watched, %
    exit_code: int = 0
    error: str = ""  # the last line of what the script raised, if it did
    worst: tuple[WorstTensor, ...] = ()
    conversion: tuple[dict[str, Any], ...] = ()  # the conversion report's rows


@dataclass(frozen=True)
class TwinFacts:
    """What is known of the baseline (or of its noise twin)."""

    name: str
    dtype: str
    steps: int
    final_loss: float | None  # mean over the last quarter
    eval_value: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    nan_steps: int = 0
    skipped_steps: int = 0
    exit_code: int = 0
    error: str = ""
    counted: str = "tokens"  # what its steps read: tokens, samples, or "tokens and samples"


@dataclass(frozen=True)
class Verdict:
    """The whole comparison."""

    command: str
    steps: int
    judged: bool
    why_not: str  # why nothing was judged; "" if it was
    emulated: bool  # FP8 products were emulated, so speed says nothing
    hardware: str
    baseline: TwinFacts
    noise: TwinFacts | None
    variants: tuple[VariantVerdict, ...]
    notes: tuple[str, ...] = ()  # torch.compile was off, a layer never ran, the batch size changed ...
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    schema: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        """The inverse of `to_dict`, also after a round trip through JSON (where tuples become lists)."""
        variants = []
        for row in data["variants"]:
            row = dict(row)
            row["same_weights"] = tuple(
                SameWeights(**{**item, "layers": tuple((n, c, e) for n, c, e in item["layers"])})
                for item in row["same_weights"]
            )
            row["worst"] = tuple(WorstTensor(**item) for item in row["worst"])
            row["conversion"] = tuple(row["conversion"])
            row["window"] = tuple(row["window"]) if row["window"] else None
            variants.append(VariantVerdict(**row))
        noise = TwinFacts(**data["noise"]) if data["noise"] else None
        fixed = {
            "baseline": TwinFacts(**data["baseline"]),
            "noise": noise,
            "variants": tuple(variants),
            "notes": tuple(data["notes"]),
        }
        return cls(**{**data, **fixed})
