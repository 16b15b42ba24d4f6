"""The linear layers of a converted run, of all of its ranks, by the names that their sites have.

rows       of each rank's own models, as its session knew them; `stages` says which stage of a pipeline has which
stages     that share a name carry their number (metrics/stages.py)
one name   is one layer, of which ranks have copies or shards. It is several where its shape or what became of it is
           not the same, or where the ranks' models are other parts (`part`): stages that somebody made by hand. Such
           rows say `of_ranks` whose they are
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narrowgauge.metrics.stages import Stages
from narrowgauge.observe.store.ends import in_words

Ranks = Mapping[int, Mapping[str, Any]]  # the metadata of each rank
Row = dict[str, Any]


def converted(ranks: Ranks) -> tuple[Row, ...]:
    """What became of each layer: the rows of all ranks as one table."""
    name_of = names(ranks)
    layers: dict[tuple[str, ...], dict[int, Row]] = {}
    holders: dict[str, set[int]] = {}
    for rank, facts in ranks.items():
        for row in rows(facts):
            name = name_of(rank, str(row.get("name", "?")))
            key = name, *(str(row.get(what)) for what in ("part", "shape", "recipe", "reason"))
            layers.setdefault(key, {})[rank] = {**row, "name": name}
            holders.setdefault(name, set()).add(rank)
    return tuple(_one(of_ranks, apart=of_ranks.keys() != holders[name]) for (name, *_), of_ranks in layers.items())


def label(row: Mapping[str, Any]) -> str:
    """What a row's layer is called: with its ranks, if others have another layer of that name.

    >>> label({"name": "0", "of_ranks": [0, 1, 2, 5]}), label({"name": "head"})
    ('0 (ranks 0 to 2 and 5)', 'head')
    """
    name, ranks = str(row.get("name", "?")), row.get("of_ranks")
    return f"{name} ({in_words(ranks)})" if ranks else name


def rows(facts: Mapping[str, Any]) -> list[Row]:
    """One rank's own. How often layers were called is told at its end: before, and if it was killed, nobody knows."""
    known = [row for row in facts.get("conversion") or () if isinstance(row, dict)]
    return known if "steps" in facts else [{**row, "calls": None} if row.get("calls") == 0 else row for row in known]


def names(ranks: Ranks) -> Callable[[int, str], str]:
    """What a layer of a rank is called in the run."""
    stages = Stages()
    for facts in ranks.values():
        own = {*(str(row.get("name")) for row in rows(facts)), *map(str, facts.get("judged") or ())}
        stages.learn((f"{name}:", _stage(facts, name)) for name in own)

    def of(rank: int, name: str) -> str:
        return stages.names([(f"{name}:", _stage(ranks[rank], name))])[0].removesuffix(":")

    return of


def _stage(facts: Mapping[str, Any], name: str) -> int | None:
    """The stage of a pipeline that a layer is in, or what it is one product of; None if it is in none."""
    stages = facts.get("stages") or {}
    while name and name not in stages:
        name = name.rpartition(".")[0]
    return stages.get(name)


def _one(of_ranks: Mapping[int, Row], *, apart: bool) -> Row:
    """One layer's row, of those that ranks have of it."""
    first, *_ = of_ranks.values()
    calls = [row["calls"] for row in of_ranks.values() if isinstance(row.get("calls"), int)]
    return {**first, **({"calls": max(calls)} if calls else {}), **({"of_ranks": sorted(of_ranks)} if apart else {})}
