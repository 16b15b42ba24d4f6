"""What will happen to each linear layer, decided before anything changes.

The first reason that applies is the one that the report shows:

    cannot (class, weight, dtype) > tied weight > skip > first/last > only > rules > shape > speed > high

A tied weight converts only if a rule names the layer outright. The backend, chosen once per recipe and
device, has the last word about shapes. Speed is judged only where `skip_slow` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from narrowgauge.compute import kernels
from narrowgauge.compute.kernels import Backend
from narrowgauge.compute.nn.conversion.eligible import refusal
from narrowgauge.compute.nn.conversion.rule_checks import check_patterns, check_rules, some
from narrowgauge.compute.nn.conversion.rules import Rule, covers, decide
from narrowgauge.compute.nn.conversion.speed_map import SlowLayers
from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.compute.nn.conversion.switches import Switch, apply, check_switches
from narrowgauge.compute.recipes import Recipe, by_name
from narrowgauge.errors import ConversionError, RecipeError

FILTERED = ("skip=", "first=", "last=", "not in only=")  # what reasons of filters begin with


@dataclass(frozen=True)
class Request:
    """What `convert` was asked for."""

    recipe: Recipe
    rules: tuple[Rule, ...]
    skip: tuple[str, ...] = ()
    first: int = 0
    last: int = 0
    backend: str | None = None
    only: tuple[str, ...] | None = None
    high: tuple[Switch, ...] = ()

    def check(self, layers: Sequence[Layer], modules: Sequence[str]) -> None:
        """Raise ConversionError for anything in it that selects nothing."""
        check_rules(self.rules, layers, modules)
        check_patterns("skip", self.skip, layers, modules)
        check_patterns("only", self.only or (), layers, modules)
        check_switches(self.high, layers, modules)
        first, last = self.first, self.last
        blocks = max((layer.blocks for layer in layers), default=0)
        if first < 0 or last < 0:
            raise ConversionError(f"first={first}, last={last}: both count blocks that stay high, so 0 or more.")
        if (first or last) and not blocks:
            raise ConversionError(
                f"first={first}, last={last} count repeated blocks, but the model has no list of two or more "
                "children of one class; name the layers with skip= instead."
            )
        if (first or last) and first + last >= blocks:
            raise ConversionError(f"first={first} and last={last} keep all {blocks} blocks high; keep fewer.")

    def decide(self, layer: Layer) -> tuple[Recipe | None, str]:
        """The recipe of one layer (None: it stays high) and the reason, before any backend is asked."""
        cannot = refusal(layer)
        if cannot:
            return None, cannot
        rule, reason = decide(layer, self.rules)
        if layer.tied and not (rule is not None and rule.names_one):
            return None, f"its weight is tied to {', '.join(layer.tied)}"
        for pattern in self.skip:
            if covers(pattern, layer):
                return None, f"skip={pattern!r}"
        if layer.block is not None and layer.block < self.first:
            return None, f"first={self.first}: block {layer.block} of {layer.blocks} stays high"
        if layer.block is not None and layer.block >= layer.blocks - self.last:
            return None, f"last={self.last}: block {layer.block} of {layer.blocks} stays high"
        if self.only is not None and not any(covers(pattern, layer) for pattern in self.only):
            return None, "not in only="
        if rule is None or rule.high:
            return None, reason
        return self.recipe if rule.recipe is None else resolve(rule.recipe), reason


@dataclass(frozen=True)
class Plan:
    """What will happen to one layer; without a recipe it stays high."""

    layer: Layer
    recipe: Recipe | None
    reason: str
    backend: Backend | None = None
    why_backend: str = ""
    chosen: bool = False  # it stays high by a filter or a rule: another would convert it, as far as its shape allows


def make_plans(request: Request, layers: Sequence[Layer], slow: SlowLayers | None = None) -> list[Plan]:
    """One plan per layer; asks for a backend once per recipe and device. `slow` keeps high what FP8 slows down."""
    chosen: dict[tuple[Recipe, str], tuple[Backend, str]] = {}
    plans = []
    for layer in layers:
        recipe, reason = request.decide(layer)
        if recipe is None:
            plans.append(Plan(layer, None, reason, chosen=refusal(layer) is None))
            continue
        device = layer.weight.device
        key = (recipe, str(device))
        if key not in chosen:
            chosen[key] = kernels.choose(recipe, device, request.backend)
        backend, why = chosen[key]
        refused = backend.refuses(recipe, *layer.product)
        if refused is None and slow is not None:
            refused = slow.reason(recipe, *layer.product, device)
        if refused:
            plans.append(Plan(layer, None, refused))
            continue
        kept, what = apply(request.high, layer, recipe)  # last: who judges kernels and speed knows whole recipes
        if kept is None:
            plans.append(Plan(layer, None, what))
        else:
            plans.append(Plan(layer, kept, f"{reason}; {what}" if what else reason, backend, why))
    return plans


def resolve(recipe: Recipe | str) -> Recipe:
    """A recipe given by value or by name; RecipeError names the nearest."""
    if not isinstance(recipe, str | Recipe):
        raise RecipeError(f"{recipe!r} is no recipe; expected one of narrowgauge.recipes, or its name.")
    return by_name(recipe) if isinstance(recipe, str) else recipe


def nothing_to_convert(model: nn.Module, plans: Sequence[Plan]) -> ConversionError:
    """The error for a model without an eligible layer: what was found instead, commonest reason first."""
    name = type(model).__name__
    if not plans:
        kinds = sorted({type(m).__name__ for m in model.modules() if m._parameters} or {name})
        return ConversionError(
            f"{name} has no linear layer to convert; its parameters are in modules of class {', '.join(kinds)}."
        )
    by_reason: dict[str, list[str]] = {}
    for plan in plans:
        by_reason.setdefault(plan.reason, []).append(plan.layer.name)
    found = "; ".join(
        f"{some(names, 3)}: {reason}" for reason, names in sorted(by_reason.items(), key=lambda x: -len(x[1]))
    )
    advice = ""
    chosen = [plan.reason for plan in plans if plan.chosen]  # of what cannot run in FP8 nobody makes another
    filtered = [reason for reason in chosen if reason.startswith(FILTERED)]
    if filtered:
        advice += (
            " skip, only, first and last are arguments of ng.convert, and keys of [convert] in a settings file "
            "(--config)."
        )
    if len(filtered) < len(chosen):
        advice += (
            " What a rule keeps high goes to FP8 by rules.Rule.to(NAME) in front of the rules of ng.convert, in the "
            "program: no file of settings has rules."
        )
    return ConversionError(f"none of the {len(plans)} linear layers of {name} can be converted ({found}).{advice}")
