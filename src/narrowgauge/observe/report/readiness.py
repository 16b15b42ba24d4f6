"""FP8 readiness: of a run, what each recipe that was asked would do to every tensor, ranked, before anyone switches.

    the run's own rows      by the recipe that it was converted to, or that plain layers were judged by
    RUN/what_if/NAME/       by the others

A site is in trouble under a recipe if one of the verdict's signs says so (`verdict.worst`), over the second half of the
steps in which all were asked of it (`together.py`). `best` is the first recipe, in the order in which they were asked,
without trouble that comes near the best of these (`verdict.choice`).
"""

from __future__ import annotations

import io
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from narrowgauge.errors import RunError
from narrowgauge.metrics.site import OPERAND_ROLES
from narrowgauge.observe.report.together import LeftOut, left_out, together
from narrowgauge.observe.store import Run, open_run, role_of
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.inside import written
from narrowgauge.observe.verdict.choice import simplest
from narrowgauge.observe.verdict.high import stays_high
from narrowgauge.observe.verdict.types import WorstTensor
from narrowgauge.observe.verdict.worst import COUNTS, NOTHING, every_step, worst_tensors

FOLDER = "what_if"
EVERYTHING = 1 << 30
MOST_STEPS = 4  # that are named one by one
MOST_NAMES = 3


@dataclass(frozen=True)
class Tensor:
    """One site under every recipe: `sqnr_db`, where there is one, and `trouble` (why; "" without) by recipe, and the
    recipe to take ("none" where all are in trouble, "-" where nothing says which)."""

    site: str
    sqnr_db: Mapping[str, float]
    trouble: Mapping[str, str]
    best: str


@dataclass(frozen=True)
class Asked:
    """One recipe: of how many sites how many are in trouble, the median SQNR, and its worst sites, worst first."""

    name: str
    sites: int
    trouble: int
    median_db: float
    worst: tuple[WorstTensor, ...]

    @property
    def said(self) -> str:
        """Its worst site, and what is wrong with it; of a healthy one its SQNR."""
        if not self.worst:
            return "-"
        worst = self.worst[0]
        healthy = "exact" if worst.value == math.inf else f"{db(worst.value)} dB"
        return f"{worst.site}: {healthy if worst.remedy == NOTHING else worst.why}"


@dataclass(frozen=True)
class Readiness:
    """What a run knows of each recipe by these `steps`; `tensors` are ranked, the worst under the first one first.

    `without` are those that could be among them, and are not; `ungraded` layers that learn, and whose gradients were
    not seen.
    """

    recipes: tuple[Asked, ...]
    tensors: tuple[Tensor, ...]
    steps: tuple[int, ...]
    without: LeftOut = field(default_factory=LeftOut)
    ungraded: tuple[str, ...] = ()
    broken: int = 0  # of `tensors`, those with NaN or Inf


def readiness(run: Run) -> Readiness | None:
    """What each recipe would do, None if the run knows of no more than the one of its own rows."""
    runs = _runs(run)
    if len(runs) < 2:
        return None
    beside = [part for part in runs.values() if part is not run]
    steps = together(beside)
    if not steps:  # it was killed before any of its rows were written
        return None
    others = _of_another_recipe(run)  # the sites whose own rows are no rows of the run's recipe
    own = {site: its for site, its in steps.items() if not others(site)}
    known = {name: own if part is run else steps for name, part in runs.items()}
    ranked = {name: worst_tensors(part, EVERYTHING, known[name]) for name, part in runs.items()}
    sqnr = {name: _sqnr(part, known[name]) for name, part in runs.items()}
    recipes = tuple(_asked(name, ranked[name], sqnr[name]) for name in runs)
    why = {name: {t.site: "" if t.remedy == NOTHING else t.why for t in tensors} for name, tensors in ranked.items()}
    order = dict.fromkeys(t.site for tensors in ranked.values() for t in tensors)
    tensors = []
    for site in order:
        db = {name: sqnr[name][site] for name in runs if site in sqnr[name]}
        trouble = {name: why[name].get(site, "") for name in runs}
        if db or any(trouble.values()):  # of what is NaN there is no SQNR
            tensors.append(Tensor(site, db, trouble, _best(db, trouble)))
    told = {tensor.site for tensor in tensors}
    silent = tuple(sorted(site for site in steps if site not in told and role_of(site) in OPERAND_ROLES))
    without = left_out(run, beside, steps, lambda site: not others(site))
    if all({"sqnr_db", *COUNTS} <= set(part.metrics) for part in runs.values()):  # or else they need not be zeros
        without = replace(without, empty=silent)
    else:
        without = replace(without, unmeasured=silent)
    ungraded = tuple(map(str, run.meta.get("gradients_not_seen") or ()))
    broken = {tensor.site for of in ranked.values() for tensor in of if tensor.metric in COUNTS}
    return Readiness(recipes, tuple(tensors), tuple(every_step(steps)), without, ungraded, len(broken))


def table(found: Readiness, top: int = 20) -> RenderableType:
    """For a rich `Console`: the recipes, then the tensors, `top` of them at most."""
    recipes = Table("recipe", "sites", "in trouble", "median dB", "worst", box=None, pad_edge=False)
    for asked in found.recipes:
        recipes.add_row(asked.name, str(asked.sites), str(asked.trouble), db(asked.median_db), Text(asked.said))
    names = [asked.name for asked in found.recipes]
    tensors = Table("tensor", *names, "best", box=None, pad_edge=False)
    for tensor in found.tensors[:top]:
        tensors.add_row(Text(tensor.site), *cells(tensor, names), tensor.best)
    left = len(found.tensors) - top
    parts: list[RenderableType] = [
        Text(f"What each recipe would do to this run's tensors ({when(found)})", style="bold"), recipes, Text(""),
        Text(in_short(found)), Text(""),
        Text(f"Tensors, the worst under {names[0]} first: SQNR in dB; ! is in trouble", style="bold"), tensors,
    ]  # fmt: skip
    below = [f"and {left} more" if left > 0 else "", found.without.said]
    return Group(*parts, *(Text(line) for line in below if line))


def plain(found: Readiness, top: int = 20, width: int = 160) -> str:
    """The same as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(table(found, top))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def cells(tensor: Tensor, names: list[str]) -> list[str]:
    """A tensor's SQNR under each recipe, "!" behind those that it is in trouble under."""
    return [f"{db(tensor.sqnr_db.get(name, math.nan))}{'!' if tensor.trouble[name] else ''}" for name in names]


def in_short(found: Readiness) -> str:
    """Which recipes leave no tensor in trouble, and how many the others do, in a sentence or two."""
    fine = [asked.name for asked in found.recipes if asked.sites and not asked.trouble]
    rest = [f"{asked.trouble} of {asked.sites} under {asked.name}" for asked in found.recipes if asked.trouble]
    said = [f"No tensor is in trouble under {_listed(fine)}."] if fine else []
    if rest:
        said.append(f"In trouble: {_listed(rest)}.")
    if found.recipes and not said:
        said.append("Nothing that was recorded says what a recipe would do.")
    if found.broken:
        said.append(f"{found.broken} of these are so whatever the recipe: the run itself has NaN or Inf there.")
    if found.ungraded:
        more = len(found.ungraded) - MOST_NAMES
        named = [*found.ungraded[:MOST_NAMES], *([f"{more} more"] if more > 0 else [])]
        said.append(f"Nothing is known of the gradients of {_listed(named)}: they were not seen.")
    return " ".join(said)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def when(found: Readiness) -> str:
    """The steps that it is known of, in a few words."""
    steps = found.steps
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    if len(steps) <= MOST_STEPS:
        return f"steps {_listed([f'{step:,}' for step in steps])}"
    return f"{len(steps):,} steps from {steps[0]:,} to {steps[-1]:,}"


def db(value: float) -> str:
    """Decibels with one decimal; "-" of none, "exact" where nothing is lost."""
    return "-" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f}"


def _runs(run: Run) -> dict[str, Run]:
    meta = run.meta
    own = str(meta.get("recipe") or meta.get("judged_by") or "")
    below = (meta.get("watch") or {}).get("what_if", {}).get("recipes") or _folders(run)
    runs = {own: run} if own else {}
    for name in map(str, below):
        folder = run.path / FOLDER / name
        if not (manifests.ranks(folder) or written(folder)):  # it was asked, and nothing was recorded
            continue
        try:
            runs[name] = open_run(folder, skip_corrupt=True)
        except RunError as error:
            warnings.warn(f"FP8 readiness goes on without {name}: {error}", stacklevel=2)
    return runs


def _of_another_recipe(run: Run) -> Callable[[str], bool]:
    """Whether a site stayed high, and was judged by another recipe than the one that the run was converted to."""
    same = run.meta.get("judged_by") == run.meta.get("recipe")
    return (lambda site: False) if same else stays_high(run.metas)


def _folders(run: Run) -> list[str]:
    """A run that was killed has not said what it asked."""
    folder = run.path / FOLDER
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _sqnr(run: Run, steps: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """The median of each site's SQNR over its steps."""
    if "sqnr_db" not in run.metrics:
        return {}
    rows = run.tensors(columns="sqnr_db", steps=every_step(steps))
    wanted = {site: set(those) for site, those in steps.items()}
    by_site: dict[str, list[float]] = {}
    for site, step, value in zip(rows["site"], rows["step"], rows["sqnr_db"], strict=True):
        if value == value and step in wanted.get(site, ()):
            by_site.setdefault(str(site), []).append(float(value))
    return {site: statistics.median(found) for site, found in by_site.items()}


def _asked(name: str, ranked: tuple[WorstTensor, ...], sqnr: dict[str, float]) -> Asked:
    trouble = sum(tensor.remedy != NOTHING for tensor in ranked)
    median = statistics.median(sqnr.values()) if sqnr else math.nan
    return Asked(name, len(ranked), trouble, median, ranked[:5])


def _best(sqnr: Mapping[str, float], trouble: Mapping[str, str]) -> str:
    healthy = {name: value for name, value in sqnr.items() if not trouble[name]}
    if healthy:
        return simplest(healthy)
    return "none" if all(trouble[name] for name in sqnr or trouble) else "-"
