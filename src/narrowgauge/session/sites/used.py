"""A layer that was used, as one observer knows it: what is looked at of it, operand by operand."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.observe.stats.again import Again


@dataclass(eq=False, slots=True)
class Site:
    """One operand of it.

    Attributes:
        key: the observer's id, the layer's name and the role.
        again: the shorter way of what lies in memory as it did, once there is one.
    """

    state: LayerState
    role: OperandRole
    key: tuple[int, str, str]
    again: Again | None = None

    @property
    def observer(self) -> Observer | None:
        """Who looks at it."""
        return self.state.observer

    @property
    def module(self) -> str:
        """The layer's name in the run."""
        return str(getattr(self.state.observer, "name", str)(self.state.name))

    def __str__(self) -> str:
        return f"{self.module}:{self.role}"


class Used:
    """All of them; `key` is the observer's id and the layer's name."""

    __slots__ = ("grad_output", "input", "key", "state", "weight")

    def __init__(self, key: tuple[int, str], state: LayerState) -> None:
        self.key, self.state = key, state
        self.input = Site(state, "input", (*key, "input"))
        self.weight = Site(state, "weight", (*key, "weight"))
        self.grad_output = Site(state, "grad_output", (*key, "grad_output"))
