"""What may help a tensor in trouble: of several things those that its run does not do already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HIGH = "this layer in high precision"
_OF_THE_MOMENT = ("current", "rowwise", "blockwise", "mxfp8", "mxfp8-ocp")  # their scales come from the tensor itself
_MICROSCALED = ("mxfp8", "mxfp8-ocp")
DONE_BY: Mapping[str, Sequence[str]] = {  # what helps, and the recipes that do it, or to which it means nothing
    "current scaling": _OF_THE_MOMENT,
    "a margin": _MICROSCALED,
    "mxfp8, whose scales are rounded up": ("", "current", "delayed", "static", "rowwise", "blockwise", "mxfp8"),
    "rowwise scaling": ("rowwise", "blockwise", *_MICROSCALED),
    "blockwise scaling": ("blockwise", *_MICROSCALED),
    "a finer granularity": _MICROSCALED,
}


def fitting(what: Sequence[str], recipe: str) -> str:
    """Those of `what` that a run in `recipe` may try, in words; if none is left, high precision.

    >>> fitting(["current scaling", "a margin"], "delayed")
    'current scaling, or a margin'
    >>> fitting(["rowwise scaling", "blockwise scaling"], "rowwise"), fitting(["blockwise scaling"], "blockwise")
    ('blockwise scaling', 'this layer in high precision')
    """
    kind = recipe.removeprefix("fake-")
    *others, last = [each for each in what if kind not in DONE_BY.get(each, ())] or [HIGH]
    return f"{', '.join(others)}, or {last}" if others else last
