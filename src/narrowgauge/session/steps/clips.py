"""Norms that a program took to clip its gradients by: from before the clip, and for nothing.

clipped again     what was clipped already has another norm now: the first one counts; a clip of more than all before
                  takes their place, and so does one of the same after another backward
one for several   a norm by which several groups are clipped, one after the other, is of them all
not clipped       gradients of what steps too, while a part of it was clipped: their norm is taken as where nobody clips

Of two clips that only overlap the overlap counts twice: nobody knows its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from narrowgauge.session.tensors.deferred import kept
from narrowgauge.session.tensors.norms import Squares, of_clips


@dataclass
class Clip:
    """One norm, kept; the program's own tensor; the ids of the parameters, None where it is not known which."""

    norm: Tensor | float
    told: Tensor
    of: frozenset[int] | None


class Clips:
    """Those of one step, or since the last."""

    def __init__(self) -> None:
        self._clips: list[Clip] = []
        self._covered: set[int] | frozenset[int] = frozenset()  # by all that are known; those of one are no copy
        self._unknown = False  # one is of nobody knows which
        self._old = 0  # of so many the gradients have grown since

    def __bool__(self) -> bool:
        return bool(self._clips)

    def add(self, norm: Tensor, of: frozenset[int] | None = None) -> None:
        """The program clipped the gradients of these parameters, by their ids; nothing, if there are none."""
        if of is not None and not of:
            return
        latest = self._clips[-1] if self._clips else None
        if latest is not None and latest.told is norm:
            latest.of = None if of is None or latest.of is None else latest.of | of
            self._know(latest)
            return
        self._add(Clip(kept(norm), norm, of))

    def grown(self) -> None:
        """Another backward adds to the gradients."""
        self._old = len(self._clips)

    def keep_known(self) -> None:
        """Only those of which it is known whose gradients were clipped."""
        if self._unknown:
            self._keep([clip for clip in self._clips if clip.of is not None])

    def join(self, later: Clips) -> None:
        """Take these as well, and leave none there."""
        for clip in later._clips:
            self._add(clip)
        later._keep([])

    def _add(self, clip: Clip) -> None:
        if self._old:
            self._keep([c for n, c in enumerate(self._clips) if n >= self._old or not _again(c, clip)])
        if clip.of is not None and not self._unknown and self._clips:
            if clip.of <= self._covered:
                return
            if clip.of > self._covered:
                self._keep([])
        self._clips.append(clip)
        self._know(clip)

    def _keep(self, clips: list[Clip]) -> None:
        self._clips, self._covered, self._unknown, self._old = clips, frozenset(), False, 0
        for clip in clips:
            self._know(clip)

    def _know(self, clip: Clip) -> None:
        self._unknown |= clip.of is None
        if not self._covered:
            self._covered = clip.of or frozenset()
        elif clip.of:
            if not isinstance(self._covered, set):
                self._covered = set(self._covered)
            self._covered |= clip.of

    def left_out(self, held: Sequence[Tensor], trained: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
        """Which of these parameters have gradients that no clip was of; none of them where that is not known.

        Args:
            held: an optimizer's. To read whether each has a gradient takes longer than all else here, and mostly all
                were clipped, whether they have one or not.
            trained: those of all optimizers. What was clipped may be other tensors than these: a program's own master
                copies, say, have the gradients of its model's parameters.
        """
        if self._unknown or self._covered.issuperset(map(id, held)):
            return []
        others = [p for p in held if id(p) not in self._covered and p.grad is not None]
        return others if others and self._covered <= {id(p) for p in trained()} else []

    def norms(self, others: Sequence[tuple[frozenset[int], Squares]]) -> Mapping[str, Tensor | float]:
        """What is written of them, with gradients that were not clipped: by the parameters' ids, their squares.

        Those of an optimizer that stepped before they were clipped as well are not counted twice.
        """
        if self._unknown:
            others = ()
        more = Squares.of_all([squares for of, squares in others if not of <= self._covered]) if others else None
        return of_clips([clip.norm for clip in self._clips], more)


def _again(before: Clip, clip: Clip) -> bool:
    """Whether all that was clipped before is clipped again."""
    if before.of is None or clip.of is None:
        return before.of is clip.of
    return before.of <= clip.of
