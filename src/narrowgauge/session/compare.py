"""The one command: run a script as written, again with a breath of noise, and in FP8; then judge.

    DIR/noise/  DIR/baseline/  DIR/current/ ...     one run each        DIR/verdict.json  DIR/report.html

Every run has its own process, the same seeds, and nothing else in common. The noise twin goes first: it tells whether
the model can be converted at all, and how many steps the script makes, so that the baseline's snapshots
(same_weights.py) can be spread over all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.errors import NarrowgaugeError, RunError, UsageError
from narrowgauge.observe.export.names import of_variant
from narrowgauge.observe.report import write_report
from narrowgauge.observe.store import open_run
from narrowgauge.observe.verdict import Evidence, SameWeights, Verdict, judge
from narrowgauge.session.config import Config
from narrowgauge.session.folder import prepare
from narrowgauge.session.plan import Baseline, Plan
from narrowgauge.session.process.codes import describe_code
from narrowgauge.session.process.command import parse
from narrowgauge.session.process.launch import Ended, launch
from narrowgauge.session.same_weights import snapshot_steps
from narrowgauge.session.steps.status import Status

NOISE = 1e-2  # a third of a rounding to FP8; with less, a short run's twin has not come apart yet (docs/verdict.md)
RECORDINGS = 20
BASELINE, NOISE_TWIN = "baseline", "noise"
VERDICT_FILE, REPORT_FILE = "verdict.json", "report.html"


class Progress(Protocol):
    """Whoever shows how far the comparison is."""

    def begin(self, name: str, total: int | None) -> None:
        """A run starts; `total` steps, if known."""

    def tell(self, status: Status) -> None:
        """It moved on."""

    def end(self, name: str, ended: Ended) -> None:
        """It ended."""


@dataclass(frozen=True)
class Comparison:
    """What to compare, and where the runs go."""

    command: tuple[str, ...]
    out: Path
    recipes: tuple[str, ...] = ("current", "delayed", "blockwise")
    baseline: Baseline = "asis"
    steps: int | None = None
    config: Config = field(default_factory=Config)


class ScriptFailed(NarrowgaugeError):
    """The script itself failed, so there is nothing to compare; `code` is its own exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def compare(what: Comparison, progress: Progress) -> Verdict:
    """Run everything, judge, and write `verdict.json` and `report.html` into `what.out`.

    Raises UsageError before anything runs if the request makes no sense, ScriptFailed if the script cannot run as
    written, and ConversionError's text as UsageError if no variant could be converted.
    """
    _check(what)
    ends: dict[str, Ended] = {}

    def run(plan: Plan, total: int | None) -> Ended:
        progress.begin(plan.variant, total)
        ended = launch(plan, progress.tell)
        progress.end(plan.variant, ended)
        ends[plan.variant] = ended
        return ended

    noise = _plan(what, NOISE_TWIN, what.steps, noise=NOISE, rehearse=what.recipes)
    _must_run(noise, run(noise, what.steps))
    total = evidence(what.out, NOISE_TWIN, ends).steps
    baseline = _plan(what, BASELINE, total, probe=what.recipes, probe_steps=tuple(snapshot_steps(total)))
    _must_run(baseline, run(baseline, total))
    for name in what.recipes:
        run(_plan(what, name, total, recipe=name), total)
    _some_converted(what, ends)
    verdict = verdict_of(what.out, what.recipes, ends)
    try:
        (what.out / VERDICT_FILE).write_text(json.dumps(verdict.to_dict(), indent=1))
    except OSError as error:
        raise RunError(f"{what.out / VERDICT_FILE} cannot be written ({error.strerror}); make room there.") from error
    runs = {}
    for name in (BASELINE, NOISE_TWIN, *what.recipes):
        seen = evidence(what.out, name, ends).run
        if seen is not None:
            runs[name] = seen
    write_report(verdict, runs, what.out / REPORT_FILE)
    return verdict


def evidence(out: Path, name: str, ends: dict[str, Ended]) -> Evidence:
    """What the run `name` left, whatever became of it."""
    ended = ends.get(name, Ended(0, (), 0.0))
    try:
        run = open_run(out / name, skip_corrupt=True)
    except RunError as error:
        return Evidence(name, None, ended.code or 2, str(error))
    error_text = str(run.meta.get("error") or "")
    if ended.code and not error_text:
        error_text = describe_code(ended.code)
    return Evidence(name, run, ended.code, error_text)


def verdict_of(out: Path, recipes: Sequence[str], ends: dict[str, Ended]) -> Verdict:
    """Judge the runs that lie in `out`."""
    baseline, noise = evidence(out, BASELINE, ends), evidence(out, NOISE_TWIN, ends)
    variants = {name: evidence(out, name, ends) for name in recipes}
    same: dict[str, list[SameWeights]] = {}
    for row in baseline.meta.get("same_weights", []):
        kept = {key: value for key, value in row.items() if key != "recipe"}
        kept["layers"] = tuple((n, c, e) for n, c, e in row["layers"])
        same.setdefault(row["recipe"], []).append(SameWeights(**kept))
    return judge(baseline, noise, variants, {name: tuple(rows) for name, rows in same.items()})


def cadence(every: int, total: int | None) -> int:
    """How often to record: as asked, but at least RECORDINGS times in a short run."""
    return every if total is None else max(1, min(every, total // RECORDINGS))


def _plan(what: Comparison, variant: str, total: int | None, **more: Any) -> Plan:
    every = cadence(what.config.watch.every, total)
    settings = what.config.for_plan()
    return Plan(
        variant=variant,
        out=str(what.out / variant),
        command=what.command,
        steps=what.steps,
        baseline=_dtype_mode(what.baseline, variant),
        **{**settings, "every": every, "export": of_variant(settings["export"], variant), **more},
    )


def _dtype_mode(baseline: Baseline, variant: str) -> Baseline:
    """`fp32` takes the autocast out of the baseline only: an FP8 run keeps the script's own around its other layers."""
    return "asis" if baseline == "fp32" and variant not in (BASELINE, NOISE_TWIN) else baseline


def _check(what: Comparison) -> None:
    from narrowgauge.compute.recipes import by_name  # torch loads here, after the cheap checks

    parse(what.command)
    if not what.recipes:
        raise UsageError("no recipe was named; expected for example `--recipes current,delayed,blockwise`.")
    doubled = {name for name in what.recipes if what.recipes.count(name) > 1}
    if doubled:
        raise UsageError(f"{', '.join(sorted(doubled))} is named twice in --recipes; name each recipe once.")
    for name in what.recipes:
        by_name(name)
    prepare(what.out)


def _must_run(plan: Plan, ended: Ended) -> None:
    if ended.code == 0:
        return
    kept = f"Everything it printed, and what was recorded, is in {plan.out}."
    left = evidence(plan.folder.parent, plan.variant, {plan.variant: ended})
    if left.meta.get("refused"):
        raise UsageError(f"there is nothing to compare: {left.error}\n{kept}")
    tail = "\n".join(f"    {line}" for line in ended.last_lines)
    said = f"what it printed last:\n{tail}" if tail else "it printed nothing."
    raise ScriptFailed(
        f"the script ended with {describe_code(ended.code)} as written, before any FP8; {said}\n"
        f"{kept} Make it run by itself first.",
        ended.code if ended.code > 0 else 128 - ended.code,
    )


def _some_converted(what: Comparison, ends: dict[str, Ended]) -> None:
    """If no variant took a single step for the same reason, say that reason instead of a page without runs."""
    runs = [evidence(what.out, name, ends) for name in what.recipes]
    if all(run.meta.get("refused") for run in runs):
        reasons = "\n".join(dict.fromkeys(run.error for run in runs))
        raise UsageError(f"none of the recipes could be applied: {reasons}")
