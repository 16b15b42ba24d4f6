"""Layers that the program has converted by `ng.convert`: products that stay high, as `convert(high=...)` keeps them.

switch      another recipe in the layer's state; its scales and amax histories stay where they are
undo        the recipe that the program gave it, when the watch ends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.compute.nn.conversion.switches import Switch
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.recipes import Recipe
from narrowgauge.compute.recipes.switched import described, switched


def switch(layers: Sequence[Layer], switches: Sequence[Switch]) -> tuple[dict[str, str], Callable[[], list[str]]]:
    """Keep high what the switches name of these layers: layer -> what, in words; and what undoes it."""
    told: dict[str, str] = {}
    before: list[tuple[LayerState, Recipe]] = []
    for layer in layers:
        named = [each for each in switches if each.names(layer)]
        if not named or not isinstance(layer.module, Fp8Linear):
            continue
        state = layer.module._fp8
        recipe = state.recipe
        for each in named:
            recipe = switched(recipe, each.gemms, each.roles, each.keep)
        if recipe != state.recipe:  # or it is a layer of another model, too, and was switched there
            before.append((state, state.recipe))
            state.use(recipe)
        told[layer.name] = described(recipe)
    return told, partial(_undo, before)


def _undo(before: list[tuple[LayerState, Recipe]]) -> list[str]:
    for state, recipe in before:
        state.use(recipe)
    return []
