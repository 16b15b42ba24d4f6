"""What came of a program that `narrowgauge run` watched, in sentences for its end, read from the run's folder."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.errors import RunError

MOST_REASONS, MOST_NAMES = 3, 2  # that are told of layers that stay high


def not_found(folder: Path) -> list[str]:
    """What a program that trains has and no rank found, in the words of the first: the loss may be another stage's."""
    first, *others = [facts.get("not_found") for facts in _of_ranks(folder).values()] or [None]
    # A rank that ended without a word says nothing.
    also = [{_what(missing) for missing in found} for found in others if found is not None]
    return [missing for missing in first or () if all(_what(missing) in found for found in also)]


def _what(missing: str) -> str:
    return str(missing).partition(":")[0]


def unrecorded(folder: Path) -> list[str]:
    """That a program ended before its first recorded step, in one sentence; none if it did not."""
    return [str(facts["unrecorded"]) for facts in [*_of_ranks(folder).values()][:1] if facts.get("unrecorded")]


def converted(folder: Path) -> list[str]:
    """How many layers were converted, and which were not and why, in one line; in another what else multiplies.

    None where there is nothing to tell.
    """
    from narrowgauge.observe.verdict.converted import converted as rows_of
    from narrowgauge.observe.verdict.converted import label

    ranks = _of_ranks(folder)
    rows = rows_of(ranks)
    recipes = dict.fromkeys(str(row["recipe"]) for row in rows if row["recipe"])
    if not recipes:
        return []
    trained = any(facts.get("steps") != 0 for facts in ranks.values())  # one that was killed does not say
    high: dict[str, list[str]] = {}
    idle: list[str] = []
    for row in rows:
        if not row["recipe"]:
            high.setdefault(row["reason"], []).append(label(row))
        elif trained and row.get("calls") == 0:
            idle.append(label(row))
    many = sum(map(len, high.values()))
    emulated = ", emulated" if any(facts.get("emulated") for facts in ranks.values()) else ""
    told = f"{len(rows) - many - len(idle)} of {len(rows)} linear layer{'' if len(rows) == 1 else 's'} "
    told += "in FP8" if trained else "converted, and trained by no step"
    told += f" ({' and '.join(recipes)}{emulated})"
    commonest = sorted(high.items(), key=lambda item: -len(item[1]))
    why = [f"{_some(names)}: {reason}" for reason, names in commonest[:MOST_REASONS]]
    if left := sum(len(names) for _, names in commonest[MOST_REASONS:]):
        why.append(f"and {left} more")
    if many:
        told += f", {many} kept high: {'; '.join(why)}"
    if idle:
        told += (
            f"; {len(idle)} converted and never called ({_some(idle)}): what multiplies a weight without its layer, "
        )
        told += "as F.linear does, is not in FP8"
    return [told, *_beside(ranks, rows)]


def _beside(ranks: dict[int, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """What else was seen to multiply, in one line: a conversion knows linear layers alone."""
    from narrowgauge.observe.verdict.converted import names

    name_of, linear = names(ranks), {str(row.get("name")) for row in rows}
    images = {name_of(rank, str(n)) for rank, facts in ranks.items() for n in facts.get("convolutions") or ()}
    packed = {f"{name}.in_proj_weight".lstrip(".") for name in linear}  # counted as its attention's layer already
    judged = {name_of(rank, str(n)) for rank, facts in ranks.items() for n in facts.get("judged") or ()}
    judged -= linear | packed
    judged -= {name_of(rank, str(n)) for rank, facts in ranks.items() for n in facts.get("linear_gone") or ()}
    kinds = (("convolution", sorted(judged & images)), ("other product", sorted(judged - images)))
    told = [f"{len(found)} {kind}{'s'[: len(found) > 1]} ({_some(found)})" for kind, found in kinds if found]
    recurrent = dict(each for facts in ranks.values() for each in (facts.get("recurrent") or {}).items())
    told += [f"{many} {kind} ({share:.1%} of all parameters)" for kind, (many, share) in recurrent.items()]
    *first, last = told or [""]
    which = f"{', '.join(first)} and {last}" if first else last
    return [f"in high precision, as only linear layers are converted: {which}"] if told else []


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def unended(folder: Path, code: int) -> list[str]:
    """Which ranks of the run, and of those inside of it, did not come to their end; of one alone, why it stopped.

    Where that cannot be read although somebody wrote there, why.
    """
    from narrowgauge.observe.store import manifest as manifests
    from narrowgauge.observe.store import open_run
    from narrowgauge.observe.store.inside import folders_inside

    told = []
    for path in (folder, *folders_inside(folder)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it would say that rank 0's part is missing, as is said below
                ends = open_run(path).ends
        except RunError as error:
            told += [str(error)] if manifests.ranks(path) else []
            continue
        # A rank that makes no optimizer records nothing, and that is no news where all went well, unless it is the
        # one whose part is looked at first.
        if ends.words and (ends.unended or ends.stopped or (ends.missing and code) or 0 in ends.missing):
            told.append(f"{'' if path == folder else f'{path.name}: '}{ends.words}; what was written is kept.")
    return told


def _of_ranks(folder: Path) -> dict[int, dict[str, Any]]:
    """What the session of each rank that has a part here learned."""
    from narrowgauge.observe.store import manifest as manifests

    return {rank: facts_of(folder / manifests.name(rank)) for rank in manifests.ranks(folder)}


def facts_of(manifest: Path) -> dict[str, Any]:
    """What one rank's session learned; nothing without."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return dict(json.loads(manifest.read_text())["meta"])
    return {}


def what_came_of_it(folder: Path, code: int) -> str:
    """Where the run is; or that there is none, and why that may be."""
    from narrowgauge.observe.store.inside import runs_inside, written
    from narrowgauge.session.process.codes import describe_code

    if not folder.is_dir():  # it held at least the plan
        return f"{folder} was removed while the command ran, and what was recorded with it."
    inside = runs_inside(folder)
    before = f" before the command ended ({describe_code(code)})" if code else ""
    if _of_ranks(folder):
        more = f"; inside of it are those of processes that began later: {', '.join(inside)}" if inside else ""
        return f"the run is in {folder}{'' if written(folder) else f'; nothing was recorded{before}'}{more}"
    if inside:
        return f"the run is in {', '.join(str(folder / name) for name in inside)}"
    nothing = (
        "nothing was watched: no Python process below this command made a torch.optim optimizer that could be watched"
    )
    if code:
        return f"{nothing}{before}."
    return (
        f"{nothing} before the command ended. One that is still running may record into {folder}. A program that "
        "starts Python with -I, -E or -S, or in a container or on another machine, cannot be followed from here; nor "
        "one that takes our entry out of PYTHONPATH (write PYTHONPATH=.:$PYTHONPATH in its place), or starts without "
        "the command's environment (env -i, sudo): there, put `narrowgauge run` behind it."
    )
