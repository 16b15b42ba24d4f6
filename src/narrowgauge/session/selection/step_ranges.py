"""Which steps: ranges as a person writes them, and the question whether a step is in one of them.

"7"  7..7        "0-100"  0..100, both ends included        "500-"  500 and all that follow        7  7..7
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Span = tuple[int, int | None]  # first, last (None: without an end), both included

_RANGE = re.compile(r"\s*(\d+)\s*(?:(-)\s*(\d*)\s*)?")


def parse(text: int | str) -> Span:
    """One range.

    >>> parse("500-")
    (500, None)

    Raises:
        ValueError: it is no range; the message says what is expected.
    """
    match = _RANGE.fullmatch(str(text))
    if match is None:
        raise ValueError(f'{text!r} is no range of steps; expected "7", "0-100" or "500-"')
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else None
    if last is not None and last < first:
        raise ValueError(f'{text!r} ends before it begins; expected "{last}-{first}"')
    if last == 0:
        raise ValueError(f"{text!r} has no step: they are counted from 1")
    return first, last


class StepRanges:
    """The steps of some ranges; of none: every step.

    >>> 7 in StepRanges([(0, 3), (5, None)])
    True
    """

    def __init__(self, spans: Iterable[Iterable[int | None]] = ()) -> None:
        self.spans: tuple[Span, ...] = tuple((int(first or 0), last) for first, last in spans)

    def __contains__(self, step: int) -> bool:
        return not self.spans or any(first <= step and (last is None or step <= last) for first, last in self.spans)

    def next(self, step: int, every: int = 1) -> int | None:
        """The first step behind this one that is in a range and that `every` divides; None without one.

        >>> StepRanges([(0, 3), (25, None)]).next(3, every=10)
        30
        """
        found = [(-(-max(first, step + 1) // every) * every, last) for first, last in self.spans or ((0, None),)]
        return min((at for at, last in found if last is None or at <= last), default=None)
