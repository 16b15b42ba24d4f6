"""Which of a layer's tensors all ranks of its tensor-parallel group have alike, so that they count once.

    column-wise    x whole                    dy the rank's share of N, or whole where the output is gathered
    row-wise       x the rank's share of K    dy whole
    sequence parallel    of what is whole otherwise, each rank has rows of its own

Weights need not be told of: copies of them are found by their values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.session.tensors.sharded import members


class Copies(NamedTuple):
    """The roles whose tensors are the same on several ranks, and the lowest of these."""

    roles: tuple[OperandRole, ...] = ()
    first: int = 0

    def of(self, role: OperandRole) -> int | None:
        """The lowest rank that has the same; None if nobody else is known to."""
        return self.first if role in self.roles else None


NONE = Copies()


def copied(group: Any, *roles: OperandRole) -> Copies:
    """These roles are the same on all ranks of `group`; nothing if that has one rank, or none that are known."""
    ranks = members(group) if roles else ()
    return Copies(roles, min(ranks)) if len(ranks) > 1 else NONE
