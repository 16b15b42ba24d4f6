"""What can be said of runs without a verdict: how far they came, what their scalars say, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowgauge.observe.report import facts, words
from narrowgauge.observe.report.steps import made, number, turns
from narrowgauge.observe.store import Run

Array = NDArray[Any]


class Line(NamedTuple):
    """A row of the table: what it says of each run, by `key`, and in small print of which steps."""

    label: str
    key: str
    hint: str = ""


def _late(values: Array) -> Array:
    return values[-max(len(values) // 4, 1) :]


def _last(values: Array) -> float | None:
    found = values[np.isfinite(values)]
    return float(found[-1]) if len(found) else None


def _diverged(values: Array, broken: Array) -> bool:
    """Whether it ended with a number that is not finite: the mean of those before would say that all is well."""
    return bool(len(values)) and not np.isfinite(values[-1]) and broken[-1] == 1


def _of(measure: Callable[[Array], Any]) -> Callable[[Array], float | None]:
    def of(values: Array) -> float | None:
        found = values[np.isfinite(values)]
        return float(measure(found)) if len(found) else None

    return of


# label, scalar, hint, what is told of its values at all steps, and how it is written
SCALARS: tuple[tuple[str, str, str, Callable[[Array], float | None], Callable[[float | None], str]], ...] = (
    ("Loss", "loss", "mean over the last quarter", lambda x: _of(np.mean)(_late(x)), words.loss),
    ("Evaluation loss", "eval_loss", "last, as the program computes it", _last, words.loss),
    ("Gradient norm", "grad_norm", "median of the last quarter", lambda x: _of(np.median)(_late(x)), words.number),
    ("Update ratio", "update_ratio", "median", _of(np.median), words.number),
    ("Learning rate", "lr", "last", _last, words.number),
    ("Tokens per step", "tokens", "median", _of(np.median), words.exact),
    ("Tokens per second", "tokens_per_second", "median", _of(np.median), words.count),
    ("Step time", "step_seconds", "median", _of(np.median), words.seconds),
    ("Peak memory", "peak_memory_bytes", "", _of(np.max), words.memory),
)
OF_EACH_TURN = ("loss", "grad_norm", "update_ratio", "lr", "tokens", "tokens_per_second")
DIVERGING, NOT_FINITE = ("loss", "grad_norm"), words.number(np.nan)
ALWAYS = ("loss", "step_seconds", "peak_memory_bytes")  # the others have a row where a run has them


def lines(runs: list[dict[str, Any]]) -> tuple[Line, ...]:
    """The rows of a table of what `single` says of some runs."""
    units = {unit for run in runs for unit in run["counted"].split(" and ") if run["tokens"] != words.NONE}
    counted = " or ".join(sorted(units, reverse=True)).capitalize() or "Tokens"
    shown = [
        Line(label.replace("Tokens", counted), key, hint)
        for label, key, hint, *_ in SCALARS
        if key in ALWAYS or any(run[key] != words.NONE for run in runs)
    ]
    wrong = Line("NaN steps", "nan", words.NAN_STEPS), Line("Skipped steps", "skipped", words.SKIPPED_STEPS)
    return (Line("Ended", "status"), Line("Steps", "steps"), *shown, *wrong)


def single(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """For each run, all that a row may tell of it, by the row's key."""
    rows = []
    for name, run in runs.items():
        scalars = run.scalars()

        def column(key: str, scalars: Any = scalars) -> Array:
            return np.asarray(scalars[key], dtype=np.float64) if key in scalars else np.zeros(0)

        trained, parts = made(scalars), [part for _, part in turns(scalars)]
        broken = column("nonfinite") if "nonfinite" in scalars else np.zeros(len(trained))
        told = {}
        for _, key, _, of, written in SCALARS:
            if key in scalars:  # an evaluation before the first step has a row, and no loss
                steps = [part & trained for part in parts] if key in OF_EACH_TURN else [np.ones(len(trained), bool)]
                values = [column(key)[each] for each in steps]
                told[key] = words.listing(
                    [
                        NOT_FINITE if key in DIVERGING and _diverged(each, broken[some]) else written(of(each))
                        for each, some in zip(values, steps, strict=True)
                    ]
                )
        if "eval_loss" in told and (sums := run.meta.get("eval_sums")):
            told["eval_loss"] += " (a sum over a batch)" if len(set(sums)) == 1 else " (of sums over batches, in part)"
        rows.append(
            {
                **{key: words.NONE for _, key, *_ in SCALARS},
                **told,
                "name": name,
                "counted": str(run.meta.get("counted") or "tokens"),
                "steps": f"{number(run, scalars):,}",
                "nan": int(np.nansum(column("nonfinite"))),
                # not all have a row where the program was left alone between recorded steps
                "skipped": max(int(np.nansum(column("skipped"))), int(run.meta.get("skipped_steps") or 0)),
                "status": facts.state_of(run),
            }
        )
    return rows
