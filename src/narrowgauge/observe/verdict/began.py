"""Where numbers of a run stopped being finite, as far as it knows: the first step, and what had NaN or Inf there.

    tensors    of the first recorded step in which any has: weights, which had them before, then each layer's input and
               output, then the gradients, from the last layer back
    layers     of a converted run in the order of its conversion rows; others store none: there tensors of a kind go by
               the share of them that is not finite, which seldom shrinks from one layer to the next
    scalars    are of every step, recorded or not: `nonfinite` says where the loss or the gradient's norm went first

What a gradient scaler finds in the gradients, and skips the step for, does not count: it is there to find it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowgauge.metrics.site import natural
from narrowgauge.observe.store import Run, role_of
from narrowgauge.observe.verdict.converted import converted

COUNTS = {"nan_count": "NaN", "inf_count": "Inf"}
MOST = 3  # tensors that are named
MADE = ("weight", "input", "output", "grad_output", "grad_input", "grad_weight")  # of one layer, in this order


def began(run: Run) -> str:
    """Where NaN and Inf began, in a few sentences; "" of a run that had none."""
    flag, skipped, bad = _scalar(run, "nonfinite"), _scalar(run, "skipped"), _bad(run)
    lost = min((step for step, value in flag.items() if value > 0), default=None)
    first = min((step for step in bad if bad[step] and (flag.get(step) or not skipped.get(step))), default=None)
    if first is None and lost is None:
        return ""
    said = []
    if first is not None:
        before = [step for step, value in flag.items() if value > 0 and step < first and not skipped.get(step)]
        said = _tensors(run, first, min(before, default=first - 1))
    if lost is None:
        return " ".join([*said, "Loss and gradient norm stayed finite."] if flag else said)
    where = "there, too" if lost == first else f"in step {lost:,}"
    if bad and lost not in bad:
        where += ", which was not recorded"
    elif bad and not bad[lost]:
        where += ", where no recorded tensor has any"
    return " ".join([*said, f"Loss or gradient norm was first not finite {where}."])


def _scalar(run: Run, name: str) -> dict[int, float]:
    """A scalar by step; of none, nothing."""
    if name not in run.scalar_names:
        return {}
    table = run.scalars(name)
    return {int(step): float(value) for step, value in zip(table["step"], table[name], strict=True) if value == value}


def _bad(run: Run) -> dict[int, bool]:
    """Of each recorded step whether any tensor has NaN or Inf in it; nothing where nobody counted these."""
    if not COUNTS.keys() & set(run.metrics):
        return {}
    table = run.sql(f"SELECT step, max({_count(run, *COUNTS)}) > 0 AS bad FROM tensors GROUP BY step")
    return {int(step): bool(bad) for step, bad in zip(table["step"], table["bad"], strict=True)}


def _count(run: Run, *names: str) -> str:
    return " + ".join(f"coalesce({name}, 0)" if name in run.metrics else "0" for name in names)


def _tensors(run: Run, step: int, before: int) -> list[str]:
    """Which tensors have any in a step; `before`: the one whose gradients may have brought them to the weights."""
    bad, numel = _count(run, *COUNTS), "numel" if "numel" in run.metrics else "1"
    each = ", ".join(f"sum({_count(run, name)}) AS {name}" for name in COUNTS)
    picks = f"site, {each}, sum({bad}) / sum({numel}) AS share"
    table = run.sql(f"SELECT {picks} FROM tensors WHERE step = ? AND {bad} > 0 GROUP BY site", [step])
    kind = " and ".join(kind for name, kind in COUNTS.items() if table[name].sum() > 0)
    sites, order = _ordered(run, dict(zip(map(str, table["site"]), map(float, table["share"]), strict=True)))
    named, last = sites[:MOST], f"{len(sites) - MOST:,} more"
    if len(sites) <= MOST:
        *named, last = sites
    listed = f"{', '.join(named)} and {last}" if named else last
    said = f"Step {step:,} is the first recorded one with {kind}: in {listed}{order}."
    if role_of(sites[0]) != "weight":
        return [said]
    look = f"so an update brought it: look at the gradients of step {before:,} and before"
    return [said, f"Weights have it already, {look if before > 0 else 'before any update'}."]


def _ordered(run: Run, share: Mapping[str, float]) -> tuple[list[str], str]:
    """Tensors in the order in which a step makes them, as far as that is known, and what orders them, in words."""
    place = {str(row.get("name")): at for at, row in enumerate(converted(run.metas))}
    modules = {site.rpartition(":")[0] for site in share}
    known = modules <= place.keys()

    def when(site: str) -> tuple[Any, ...]:
        module, _, name = site.rpartition(":")
        role = MADE.index(name) if name in MADE else len(MADE)
        if not known:
            return role, share[site], natural(module)
        back = name.startswith("grad_")
        return back, role > 0, -place[module] if back else place[module], role

    told = "in the order of layers" if known else "the order of layers is not known: the smallest share first"
    return sorted(share, key=when), f" ({told})" if len(modules) > 1 else ""
