"""Which parameters had a gradient as a program had torch clip them: by their ids, mostly those of the step before.

    clip_grad_norm_(parameters)      torch reads p.grad of each, and takes the norm of so many gradients
    as many as parameters            all have one, and none is read once more
    fewer, as in the step before     all others have none still, or all these still have one: whichever are fewer

To read `p.grad` of thousands takes longer than all else that is done for a row. So what was found is kept, by its ids,
which keep nothing alive. They are compared, all of them, with those that are clipped now. Where these are others, or
torch has not said how many gradients there are, each is read (`with_gradients`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from operator import eq
from typing import Any, NamedTuple

import torch

from narrowgauge.compute.nn.tracing.marks import passed_over

MANY = 64  # parameters: fewer are read as quickly
LISTS = 8  # that are kept: of one for each layer none comes again soon
_NONE_TAKEN = None, -1


class _Known(NamedTuple):
    """A list that was clipped: its ids, and those with gradients; the places of what has one, or has not, if fewer."""

    ids: tuple[int, ...]
    gradients: int
    of: frozenset[int]
    places: tuple[int, ...]
    have: bool  # those at these places have gradients, which all others then have not

    def is_like(self, parameters: list[Any], gradients: int) -> bool:
        """Whether these are the same, of which the same have gradients, there being so many of both."""
        return (
            gradients == self.gradients
            and all(map(eq, map(id, parameters), self.ids))
            and all((parameters[place].grad is not None) is self.have for place in self.places)
        )


class Clipped:
    """What torch's `clip_grad_norm_` has clipped; the two functions that it calls tell, each from its place."""

    def __init__(self) -> None:
        self._taken: tuple[Any, int] = _NONE_TAKEN
        self._known: dict[tuple[int, int], _Known] = {}

    @passed_over
    def norm_taken(self, norm: Any, gradients: Any) -> None:
        """Torch's own clip took the norm of all gradients that there are of what it clips next."""
        self._taken = (norm, len(gradients)) if type(gradients) is list else _NONE_TAKEN

    @passed_over
    def with_gradients(self, parameters: Any, norm: Any) -> frozenset[int] | None:
        """The same as the function `with_gradients`, of what torch's own clip scales down by this norm."""
        (taken, gradients), self._taken = self._taken, _NONE_TAKEN
        if norm is not taken or type(parameters) is not list or len(parameters) < MANY:
            return with_gradients(parameters)
        at = len(parameters), id(parameters[0])
        known = self._known.get(at)
        if known is None or not known.is_like(parameters, gradients):
            known = _looked_at(parameters, gradients)
            if at not in self._known and len(self._known) == LISTS:
                self._known.clear()
            self._known[at] = known
        return known.of


@passed_over
def with_gradients(parameters: Any) -> frozenset[int] | None:
    """The ids of what a program had torch clip, as far as it has gradients; None of what can be read but once."""
    if isinstance(parameters, torch.Tensor):
        parameters = (parameters,)
    plain = isinstance(parameters, list | tuple)  # which torch makes of most; to ask an abstract class takes longer
    if not plain and (not isinstance(parameters, Iterable) or isinstance(parameters, Iterator)):
        return None
    return frozenset(map(id, [p for p in parameters if p.grad is not None]))


def _looked_at(parameters: list[Any], gradients: int) -> _Known:
    ids = tuple(map(id, parameters))
    if gradients == len(ids):
        return _Known(ids, gradients, frozenset(ids), (), False)
    having = [p.grad is not None for p in parameters]
    have = 2 * gradients < len(ids)
    places = tuple(place for place, has in enumerate(having) if has is have)
    of = frozenset(number for number, has in zip(ids, having, strict=True) if has)
    # Of another number, which is never asked for, if gradients came or went since torch took their norm.
    return _Known(ids, gradients if sum(having) == gradients else -1, of, places, have)


@passed_over
def by_torchs_clip() -> bool:
    """Whether torch's own clip called what stands in another function's place, which asks this."""
    try:
        code = sys._getframe(3).f_code  # behind: what stands there, and what asks whether that is to be called
    except ValueError:  # nothing in Python did
        return False
    return code.co_name == "clip_grad_norm_" and code.co_filename == torch.nn.utils.clip_grad.__file__
