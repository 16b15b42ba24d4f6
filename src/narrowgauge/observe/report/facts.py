"""Run facts: what was run, on what, from which weights and data. A white list of metadata, never the folder's path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowgauge.observe.report import words
from narrowgauge.observe.report.steps import made
from narrowgauge.observe.store import Run
from narrowgauge.observe.verdict import Verdict

ENDS = {
    "complete": "at its end",
    "stopped": "the watch stopped early",
    "failed": "with an error",
    "killed": "killed",
    "silent": "no sign of life",
    "running": "still running",
}


@dataclass(frozen=True)
class RunFacts:
    """One line of the table of runs."""

    name: str
    status: str
    steps: str
    recipe: str
    weights: str
    data: str
    seeds: str
    watch: str


def breath(runs: Mapping[str, Run]) -> str:
    """By how much the noise twin's weights were moved, as a power of ten; "" if no run says so."""
    moved = runs["noise"].meta.get("noise") if "noise" in runs else None
    return words.power_of_ten(moved) if isinstance(moved, float) and moved > 0 else ""


def run_facts(name: str, run: Run) -> RunFacts:
    """What one run says of itself."""
    meta = run.meta
    steps = run.steps
    status = how_it_ended(run)
    lost = {kind: n for kind, n in run.lost.items() if n}
    if lost:
        status += "; lost rows: " + ", ".join(f"{n:,} {kind}" for kind, n in lost.items())
    seeds = meta.get("seeds")
    same = isinstance(seeds, Mapping) and len(set(map(str, seeds.values()))) == 1
    if isinstance(seeds, Mapping):
        seed_text = str(next(iter(seeds.values()))) if same else ", ".join(f"{k} {v}" for k, v in seeds.items())
    else:
        seed_text = "" if seeds is None else str(seeds)
    return RunFacts(
        name=name,
        status=status,
        steps=f"{int(steps[-1]):,}" if len(steps) else "0",
        recipe=_recipe(meta),
        weights=_hash(meta.get("weights_hash")),
        data=_hash(meta.get("data_hash") or _last_digest(run)),
        seeds=seed_text or words.NONE,
        watch=_watch(meta.get("watch")),
    )


def state_of(run: Run) -> str:
    """How it ended, in few words: a program that ends itself with an exit code tells that to its command alone."""
    code = run.meta.get("exit_code")
    if run.status == "complete" and isinstance(code, int) and code:
        return f"with exit code {code}" if code > 0 else f"by signal {-code}"
    return ENDS.get(run.status, run.status)


def how_it_ended(run: Run) -> str:
    """In words, with the ranks that did not come to their end."""
    state, ends, error = run.status, run.ends, words.scrub(str(run.meta.get("error") or ""))
    if ends.words and state != "complete":
        failed = f"; the program ended with an error: {error}" if error and ends.world < 2 else ""
        return words.scrub(ends.words) + failed
    told = state_of(run) + (f": {error}" if error else "")
    return f"{told}; {words.scrub(ends.words)}" if ends.words else told


def common_facts(runs: Mapping[str, Run], verdict: Verdict | None) -> list[tuple[str, str]]:
    """What the runs are of: (label, text) pairs; where runs differ in one, a pair for each that there is.

    What a verdict says itself goes for all of them, and they were started together: when the first was.
    """
    metas = {name: {**run.meta, "started": run.manifest.get("started")} for name, run in runs.items()} or {"": {}}
    if verdict is not None:
        began = min((str(meta["started"]) for meta in metas.values() if meta.get("started")), default="")
        said = {"versions": dict(verdict.versions), "started": verdict.started or began}
        metas = {name: meta | {key: value for key, value in said.items() if value} for name, meta in metas.items()}
    asked: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "Command": lambda meta: words.command_line(meta.get("command")),
        "Git revision": lambda meta: str(meta.get("git_revision") or ""),
        "Hardware": lambda meta: words.scrub(str(meta.get("hardware") or "")),
        "High precision" if verdict is None else "Baseline": lambda meta: str(meta.get("baseline_dtype") or ""),
        "Versions": lambda meta: _versions(meta.get("versions")),
        "Started": lambda meta: moment(str(meta.get("started") or "")),
    }
    facts = []
    for label, of in asked.items():
        named: dict[str, list[str]] = {}
        for name, meta in metas.items():
            if text := of(meta):
                named.setdefault(text, []).append(name)
        facts += [(label if len(named) == 1 else f"{label}: {', '.join(names)}", text) for text, names in named.items()]
    return facts


def _versions(found: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items()) if isinstance(found, Mapping) else ""


def moment(iso: str) -> str:
    """An ISO time as a person writes it, to the minute.

    >>> moment("2026-05-04T12:30:00.000+00:00")
    '2026-05-04 12:30 UTC'
    """
    if len(iso) < 16 or iso[10:11] not in ("T", " "):
        return iso
    return f"{iso[:10]} {iso[11:16]}" + (" UTC" if iso.endswith(("+00:00", "Z")) else "")


def notes_of(runs: Mapping[str, Run], said: tuple[str, ...]) -> list[str]:
    """The verdict's notes, and those of runs that it does not already repeat; no paths."""
    notes = list(said)
    for name, run in runs.items():
        for note in (*_not_found(run), *(run.meta.get("notes") or ()), *_apart(run), *_side_by_side(run)):
            if str(note) not in notes and f"{name}: {note}" not in notes:
                notes.append(f"{name}: {note}" if len(runs) > 1 else str(note))
    return [words.scrub(note) for note in notes]


def _not_found(run: Run) -> list[str]:
    """What a program that trains has and this one was not seen to have; of one of several ranks, others may have it."""
    return [] if run.meta.get("ranks") else list(run.meta.get("not_found") or ())


def _apart(run: Run) -> list[str]:
    """That some recorded steps have a row for every rank."""
    ranks = run.meta.get("ranks")
    apart = int(ranks.get("apart_steps") or 0) if isinstance(ranks, Mapping) else 0
    if not isinstance(ranks, Mapping) or not apart:
        return []
    of = apart + int(ranks.get("merged_steps") or 0)
    return [
        f"{apart} of {of} recorded steps are not merged over the ranks: of these the page shows the most extreme of "
        "the ranks' own rows, and tensors are ranked by all of them."
    ]


def _side_by_side(run: Run) -> list[str]:
    """Whose numbers a page shows where each rank wrote its own: by `watch.ranks`, or as they share no process group."""
    counted = run.meta.get("ranks")
    # Rank 0 tells first that it merges; a run that was killed has not counted what was.
    merged = "merged_within" in run.meta or (isinstance(counted, Mapping) and "merged_steps" in counted)
    ranks = () if merged else run.ranks
    if len(ranks) < 2:
        return []
    return [
        f"Each of {len(ranks)} ranks wrote its own rows here, and none is of all of them: the loss, tokens per step "
        f"and all else that a step has one number of are rank {run.rank}'s alone; of tensors the page shows the most "
        "extreme of the ranks' own rows, and ranks them by all."
    ]


def _recipe(meta: Mapping[str, Any]) -> str:
    recipe = meta.get("recipe")
    if isinstance(recipe, Mapping):
        recipe = recipe.get("name")
    return str(recipe) if recipe else str(meta.get("baseline_dtype") or words.NONE)


def _hash(value: Any) -> str:
    return str(value)[:16] if value not in (None, "") else words.NONE


def _last_digest(run: Run) -> str:
    """The chained digest of all data that the run saw, in hexadecimal; "" where none was recorded, or not of all."""
    if "data_digest" not in run.scalar_names:
        return ""
    scalars = run.scalars()
    values = np.asarray(scalars["data_digest"], dtype=np.float64)[made(scalars)]
    known = np.isfinite(values)
    return f"{int(values[-1]):013x}" if known.any() and known[known.argmax() :].all() else ""


def _watch(watch: Any) -> str:
    """How often tensors were recorded, and what that took.

    >>> _watch({"every": 5, "recorded_step_seconds": 0.3, "other_step_seconds": 0.2, "steps_in_graphs": 4})
    'every 5 steps, a recorded one takes 1.50 times as long as another, 4 recorded ones in compiled graphs of their own'
    """
    if not isinstance(watch, Mapping):
        return words.NONE
    parts = []
    if watch.get("every"):
        parts.append(f"every {watch['every']} steps")
    if isinstance(watch.get("seconds"), (int, float)):
        parts.append(f"{words.seconds(float(watch['seconds']))} of counting what tensors hold")
    recorded, other = (watch.get(f"{kind}_step_seconds") for kind in ("recorded", "other"))
    if isinstance(recorded, (int, float)) and isinstance(other, (int, float)) and other > 0:
        parts.append(f"a recorded one takes {recorded / other:.2f} times as long as another")
    brief = watch.get("steps_in_brief")
    if isinstance(brief, int) and brief:
        parts.append(f"{words.count(brief)} of the others in brief (loss, learning rates and time)")
    graphs = watch.get("steps_in_graphs")
    if isinstance(graphs, int) and graphs:
        parts.append(f"{graphs} recorded ones in compiled graphs of their own")
    passes = watch.get("steps_by_passes")
    if isinstance(passes, int) and passes:
        parts.append(f"{passes} recorded ones counted by slower passes, without the fast walk")
    return ", ".join(parts) or words.NONE
