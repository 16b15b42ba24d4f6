"""Norms that a program took to clip its gradients by: from before the clip, and for nothing.

clipped again    what was clipped already has another norm now: the first one counts; a clip of more than all before
                 takes their place
not clipped      gradients of what steps too, while a part of it was clipped: their norm is taken as where nobody clips
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from narrowgauge.session.tensors.norms import Squares, of_clips


class Clip(NamedTuple):
    """One norm, and the ids of the parameters whose gradients it is of; None where they are not known."""

    norm: Tensor
    of: frozenset[int] | None


class Clips:
    """Those of one step, or since the last."""

    def __init__(self) -> None:
        self._clips: list[Clip] = []

    def __bool__(self) -> bool:
        return bool(self._clips)

    def add(self, norm: Tensor, of: frozenset[int] | None = None) -> None:
        """The program clipped the gradients of these parameters, by their ids."""
        self._add(Clip(norm, of))

    def join(self, later: Clips) -> None:
        """Add these as well."""
        for clip in later._clips:
            self._add(clip)

    def _add(self, clip: Clip) -> None:
        covered = self._covered()
        if clip.of is None or covered is None or covered.isdisjoint(clip.of):
            self._clips.append(clip)
        elif clip.of > covered:
            self._clips = [clip]
        elif not clip.of <= covered:
            self._clips.append(clip)

    def left_out(self, owners: Sequence[Tensor], trained: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
        """Which of these parameters no clip was of; none of them where that is not known.

        Args:
            owners: an optimizer's, with gradients.
            trained: those of all optimizers. What was clipped may be other tensors than these: a program's own master
                copies, say, have the gradients of its model's parameters.
        """
        covered = self._covered()
        others = [] if covered is None else [p for p in owners if id(p) not in covered]
        if not others or covered is None or not covered <= {id(p) for p in trained()}:
            return []
        return others

    def norms(self, others: Squares | None = None) -> dict[str, Tensor]:
        """What is written of them, with the squares of gradients that were not clipped."""
        return of_clips([clip.norm for clip in self._clips], others)

    def _covered(self) -> frozenset[int] | None:
        known = [clip.of for clip in self._clips if clip.of is not None]
        return frozenset().union(*known) if len(known) == len(self._clips) else None
