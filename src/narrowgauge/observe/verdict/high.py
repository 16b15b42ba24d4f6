"""Which sites of a converted run stayed in high precision, and were only put through a recipe.

They have rows of the same metrics as those in FP8, and must not be ranked or drawn among them: what a recipe would do
to a layer that stays high has done nothing to the training.

    judged        the session's own list, if the run came to its end
    conversion    of one that was killed: the rows without a recipe
"""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge.observe.verdict.converted import Ranks, names, rows


def stays_high(ranks: Ranks) -> Callable[[str], bool]:
    """Whether a site, such as "head:input", stayed high; always no of a run that converted nothing: there all did.

    >>> high = stays_high({0: {"recipe": "rowwise", "judged": ["head"]}})
    >>> high("head:input"), high("head.in_proj:weight"), high("body:input")
    (True, True, False)

    Args:
        ranks: the metadata of each rank of the run.
    """
    name_of = names(ranks)
    high, low = set[str](), set[str]()
    for rank, meta in ranks.items():
        if not meta.get("recipe"):
            continue
        told, own = meta.get("judged"), rows(meta)
        low |= {name_of(rank, str(row.get("name"))) for row in own if row.get("recipe")}
        kept = told if isinstance(told, list) else [row.get("name") for row in own if not row.get("recipe")]
        high |= {name_of(rank, str(name)) for name in kept}
    high -= low  # a name may be another layer's by now

    def of(site: str) -> bool:
        name = site.rpartition(":")[0]
        while name and name not in high and name not in low:
            name = name.rpartition(".")[0]
        return name in high

    return of
