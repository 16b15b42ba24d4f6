"""Which products and operands of converted layers stay high: what `convert(high=...)` takes, and `[[high]]` in a file.

    {"sites": ["blocks.0"]}                                 these layers, whole: they are not converted
    {"sites": ["*.fc2"], "gemms": ["wgrad"]}                one product of some layers
    {"roles": ["grad_output"]}                              an operand, wherever it is multiplied
    {"sites": ["lm_head"], "keep": "bf16_gemm"}             quantized, but multiplied in the layer's own dtype

All that name a layer apply to it, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from narrowgauge.compute.nn.conversion.rule_checks import check_patterns
from narrowgauge.compute.nn.conversion.rules import covers
from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.compute.recipes import Recipe
from narrowgauge.compute.recipes.switched import OPERANDS, check, described, switched
from narrowgauge.errors import ConversionError, nearest


@dataclass(frozen=True)
class Switch:
    """One of them. `sites` are globs on layers' names, those with "!" in front leave out.

    For the rest see `recipes.switched`.
    """

    sites: tuple[str, ...] = ("*",)
    gemms: tuple[str, ...] = tuple(OPERANDS)
    roles: tuple[str, ...] = ()
    keep: str = "high"

    @classmethod
    def of(cls, given: Switch | Mapping[str, Any]) -> Switch:
        """A switch from a mapping with these words; RecipeError or ConversionError for other words or values."""
        if isinstance(given, Switch):
            switch = given
        else:
            known = [field.name for field in fields(cls)]
            for word in given:
                if word not in known:
                    raise ConversionError(f"high: there is no {word!r}; {nearest(str(word), known)}")
            lists = {
                word: (value,) if isinstance(value, str) else tuple(value)
                for word, value in given.items()
                if word != "keep"
            }
            switch = cls(**lists, keep=str(given.get("keep", cls.keep)))
        check(switch.gemms, switch.roles, switch.keep)
        return switch

    def names(self, layer: Layer) -> bool:
        """Whether it applies to a layer."""
        chosen = [glob for glob in self.sites if not glob.startswith("!")] or ["*"]
        return any(covers(glob, layer) for glob in chosen) and not any(
            covers(glob.removeprefix("!"), layer) for glob in self.sites if glob.startswith("!")
        )


def check_switches(switches: Sequence[Switch], layers: Sequence[Layer], modules: Sequence[str]) -> None:
    """Raise ConversionError for a glob that matches no linear layer."""
    for switch in switches:
        globs = [glob.removeprefix("!") for glob in switch.sites]
        check_patterns("high", [glob for glob in globs if glob != "*"], layers, modules)


def apply(switches: Sequence[Switch], layer: Layer, recipe: Recipe) -> tuple[Recipe | None, str]:
    """The recipe of a layer with its switches set, and what they keep, in words; None: nothing of it is in FP8."""
    for switch in switches:
        if switch.names(layer):
            recipe = switched(recipe, switch.gemms, switch.roles, switch.keep)
    if all(getattr(recipe, name).high == "ab" for name in OPERANDS):
        return None, "high= keeps all of its products"
    return recipe, described(recipe)
