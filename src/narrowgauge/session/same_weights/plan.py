"""What leads to a loss: the recorded calls that it depends on, in order.

Walking the tape backward from the loss, a call is kept when it wrote to a storage that is needed; then what it read is
needed too. Dependence is followed by storage, not by object, because views alias and in-place operations write through
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from narrowgauge.session.same_weights.ambient import Modes, Rng
from narrowgauge.session.same_weights.frozen_model import ModelState
from narrowgauge.session.same_weights.tree import Const, External, Node, walk


class NotMeasurable(Exception):
    """Why the loss and gradient cannot be computed again; the text goes into the report."""


@dataclass
class Entry:
    """One recorded call."""

    name: str
    call: Callable[..., Any]
    args: Node  # of the pair (args, kwargs)
    modes: Modes
    rng: Rng | None
    outputs: list[int] = field(default_factory=list)
    attributes: list[tuple[int, nn.Module, str, Any]] = field(default_factory=list)
    reads: set[Any] = field(default_factory=set)
    writes: set[Any] = field(default_factory=set)
    problem: str = ""


@dataclass(frozen=True)
class Plan:
    """The entries that lead to a loss, in order; `loss` is its slot of `size`."""

    entries: tuple[Entry, ...]
    loss: int
    size: int
    roots: tuple[nn.Module, ...]
    before: tuple[ModelState, ...]
    loss_scale: Tensor | None
    host_reads: frozenset[str]  # how values left the tape before the loss was complete
    constants: tuple[float, ...]  # Python floats used after that, in order

    def names(self) -> list[tuple[str, nn.Module]]:
        """The models and the prefix of their parameters' names: none for a single one, else its class."""
        if len(self.roots) == 1:
            return [("", self.roots[0])]
        kinds = [type(root).__name__ for root in self.roots]
        numbered = [f"{kind}{kinds[:i].count(kind) or ''}." for i, kind in enumerate(kinds)]
        return list(zip(numbered, self.roots, strict=True))

    def externals(self) -> list[External]:
        """Every constant tensor that a replay uses."""
        return [leaf for e in self.entries for leaf in walk(e.args) if isinstance(leaf, External)]


def plan_of(
    entries: Sequence[Entry],
    *,
    loss: int,
    keys: Sequence[Any],
    reads: Sequence[tuple[int, str]],
    roots: tuple[nn.Module, ...],
    before: tuple[ModelState, ...],
    loss_scale: Tensor | None,
) -> Plan:
    """The part of `entries` that slot `loss` depends on.

    `keys` is each slot's storage; `reads` says before which entry a value was read on the host, and how. Raises
    NotMeasurable if an entry on the way has a problem, or if no model is on the way.
    """
    needed, kept = {keys[loss]}, []
    for position in range(len(entries) - 1, -1, -1):
        entry = entries[position]
        if entry.writes & needed:
            if entry.problem:
                raise NotMeasurable(entry.problem)
            needed |= entry.reads
            kept.append((position, entry))
    kept.reverse()
    if not any(isinstance(entry.call, nn.Module) for _, entry in kept):
        raise NotMeasurable("the loss does not depend on any call of the model that could be seen")
    early = [(position, name) for position, name in reads if position <= kept[-1][0]]
    after = [entry for position, entry in kept if early and position >= early[0][0]]
    leaves = [leaf for entry in after for leaf in walk(entry.args)]
    return Plan(
        entries=tuple(entry for _, entry in kept),
        loss=loss,
        size=len(keys),
        roots=roots,
        before=before,
        loss_scale=loss_scale,
        host_reads=frozenset(name for _, name in early),
        constants=tuple(x.value for x in leaves if isinstance(x, Const) and type(x.value) is float),
    )
