"""TransformerEngine's layers: what stays high, by TransformerEngine's own means, and without its debug mode.

    a whole layer       outside of its autocast: as if the program had said so (te_hooks.py)
    single products     the layer's quantizers, composed anew in its slots (te_products.py)

A layer learns of its recipe when it is called, so both are done by a hook as the call begins. Nothing of ours is in the
recipe, in the amax history or in a checkpoint. A weight that TransformerEngine has kept in FP8 for further microbatches
is dropped as the switch begins and as it ends.

What is refused, because TransformerEngine cannot do it: single products of LayerNormMLP, whose quantizers it hands to
kernels that take no composed ones; high weights where the only ones are FP8; communication that overlaps with products,
in buffers that are made for FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from weakref import ref

from torch import nn

from narrowgauge.compute.nn.conversion.structure import Layer, clean, is_wrapper
from narrowgauge.compute.nn.conversion.switches import Switch
from narrowgauge.compute.recipes import CURRENT, Recipe
from narrowgauge.compute.recipes.switched import OPERANDS, described, switched
from narrowgauge.errors import ConversionError
from narrowgauge.session.sites.part import is_a
from narrowgauge.session.sites.transformer_engine import PACKAGE, TransformerEngine
from narrowgauge.session.switches.te_hooks import Whole
from narrowgauge.session.switches.te_operands import forms
from narrowgauge.session.switches.te_parts import available
from narrowgauge.session.switches.te_products import Products

Chosen = tuple[Layer, Recipe, str]


def layers(model: nn.Module) -> list[Layer]:
    """TransformerEngine's layers in a model, by the names that `survey` would give them."""
    wrapped, found = is_wrapper(model), dict[int, Layer]()
    for raw, module in model.named_modules(remove_duplicate=False):
        if not TransformerEngine().knows(module):
            continue
        name, known = clean(raw, wrapped=wrapped), found.get(id(module))
        found[id(module)] = (
            Layer(name, module, (0, 0)) if known is None else replace(known, aliases=(*known.aliases, name))
        )
    return list(found.values())


def chosen(found: Sequence[Layer], switches: Sequence[Switch]) -> list[Chosen]:
    """Those of which something stays high: what, as a recipe's `high`, and in words.

    Raises ConversionError for what TransformerEngine has no switch for.
    """
    named = []
    for layer in found:
        recipe = CURRENT
        for each in switches:
            if each.names(layer):
                recipe = switched(recipe, each.gemms, each.roles, each.keep)
        if what := described(recipe):
            if why := _impossible(layer.module, recipe):
                kind = type(layer.module).__name__
                raise ConversionError(
                    f"high: {layer.name!r} is a {kind} of TransformerEngine {why}, or leave it out ('!{layer.name}')."
                )
            named.append((layer, recipe, what))
    return named


def switch(named: Sequence[Chosen], called: nn.Module) -> Callable[[], list[str]]:
    """Begin, in the middle of a call of `called`; the result ends it, and tells of layers where nothing came of it."""
    hooks = []
    for layer, recipe, _ in named:
        whole = _whole(recipe)
        hook = (
            Whole() if whole else Products({role: forms(recipe, role) for role in ("input", "weight", "grad_output")})
        )
        hook.begin(layer.module, now=layer.module is called)
        hooks.append((layer.name, ref(layer.module), hook))
    return partial(_end, hooks)


def _end(hooks: list[tuple[str, ref[nn.Module], Whole | Products]]) -> list[str]:
    notes = []
    for name, known, hook in hooks:
        hook.end(known())
        if hook.problem:
            notes.append(f"high: {name!r} of TransformerEngine was not switched: {hook.problem}")
        elif not hook.reached:
            notes.append(f"high: {name!r} of TransformerEngine was never called in FP8; there was nothing to switch.")
    hooks.clear()
    return notes


def _whole(recipe: Recipe) -> bool:
    return all(getattr(recipe, gemm).high == "ab" for gemm in OPERANDS)


def _impossible(module: Any, recipe: Recipe) -> str:
    """Why TransformerEngine cannot, and what to do; "" if it can."""
    whole = _whole(recipe)
    if any(name.startswith("ub_") and value is True for name, value in vars(module).items()):
        return "that overlaps its products with communication, in buffers made for FP8; make it without ub_*=True"
    if getattr(module, "primary_weights_in_fp8", False) and (whole or forms(recipe, "weight") != ("fp8", "fp8")):
        return (
            "that has its weights in FP8 alone, so only its wgrad can stay high; make it outside of "
            "quantized_model_init, say gemms = ['wgrad']"
        )
    if whole:
        return ""
    if is_a(module, PACKAGE, "LayerNormMLP"):
        return (
            "that hands its quantizers to kernels which take no composed ones, so it can only stay high whole; "
            "name all gemms and no roles"
        )
    if getattr(module, "use_grouped_tensor", False):
        return (
            "that multiplies all experts by one kernel, so it can only stay high whole; make it with "
            "use_grouped_tensor=False"
        )
    if not available():
        version = getattr(import_module("transformer_engine"), "__version__", "another version")
        return f"{version}, without HybridQuantizer (2.20 has it), so it can only stay high whole; name all gemms"
    return ""
