"""A recipe put on a model for the length of one replay, with the scaling state that it would have in training.

Delayed and static scales are made from earlier steps. So a snapshot is a window of two consecutive steps: the first one
only fills the state, which then rolls as if the optimizer had stepped, and is carried to the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

State = dict[str, Tensor]


class Variant(Protocol):
    """A way to run modules in another precision, and back."""

    def put_on(self, module: nn.Module) -> None:
        """Convert `module` in place."""
        ...

    def take_off(self, module: nn.Module) -> None:
        """Undo it; also when `put_on` failed half way."""
        ...

    def rolled_state(self, module: nn.Module) -> Mapping[str, State]:
        """The scaling state as it is at the beginning of the next step."""
        ...

    def load_state(self, module: nn.Module, state: Mapping[str, State]) -> None:
        """Continue from such a state."""
        ...


class RecipeVariant:
    """The conversion that `narrowgauge.convert` makes."""

    def __init__(self, recipe: Any, options: Mapping[str, Any]) -> None:
        self.recipe, self.options = recipe, dict(options)

    def put_on(self, module: nn.Module) -> None:
        """Convert `module` in place."""
        from narrowgauge.compute.nn import convert

        convert(module, self.recipe, **self.options)

    def take_off(self, module: nn.Module) -> None:
        """Undo it."""
        from narrowgauge.compute.nn import revert

        if self._layers(module):
            revert(module)

    def rolled_state(self, module: nn.Module) -> Mapping[str, State]:
        """Roll the model's table once and copy it, layer by layer."""
        layers = [state for state in self._layers(module) if state.table is not None]
        for table in {id(state.table): state.table for state in layers}.values():
            table.roll()
        return {state.name: state.table.state(state.name) for state in layers}

    def load_state(self, module: nn.Module, state: Mapping[str, State]) -> None:
        """Put such a copy into the model's table."""
        for layer in self._layers(module):
            if layer.table is not None and layer.name in state:
                layer.table.load(layer.name, state[layer.name])

    @staticmethod
    def _layers(module: nn.Module) -> Sequence[Any]:
        return [m._fp8 for m in module.modules() if hasattr(m, "_fp8")]
