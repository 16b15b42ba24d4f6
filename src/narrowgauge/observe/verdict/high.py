"""Which sites of a converted run stayed in high precision, and were only put through a recipe.

They have rows of the same metrics as those in FP8, and must not be ranked or drawn among them: what a recipe would do
to a layer that stays high has done nothing to the training.

    judged        the session's own list, if the run came to its end
    conversion    of one that was killed: the rows without a recipe
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def stays_high(meta: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a site, such as "head:input", stayed high; always no of a run that converted nothing: there all did.

    >>> high = stays_high({"recipe": "rowwise", "judged": ["head"]})
    >>> high("head:input"), high("head.in_proj:weight"), high("body:input")
    (True, True, False)

    Args:
        meta: the run's metadata.
    """
    told = meta.get("judged")
    rows = [row for row in meta.get("conversion") or () if isinstance(row, Mapping)] if meta.get("recipe") else []
    low = {str(row.get("name")) for row in rows if row.get("recipe")}
    if meta.get("recipe") and isinstance(told, list):
        high = set(map(str, told)) - low  # a name may be another layer's by now
    else:
        high = {str(row.get("name")) for row in rows if not row.get("recipe")}

    def of(site: str) -> bool:
        name = site.rpartition(":")[0]
        while name and name not in high and name not in low:
            name = name.rpartition(".")[0]
        return name in high

    return of
