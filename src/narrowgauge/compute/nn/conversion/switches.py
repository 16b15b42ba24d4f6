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

from narrowgauge.compute.nn.conversion.report import Row
from narrowgauge.compute.nn.conversion.rule_checks import check_patterns
from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.compute.recipes import Recipe
from narrowgauge.compute.recipes.switched import OPERANDS, check, described, switched
from narrowgauge.errors import ConversionError, nearest
from narrowgauge.metrics.site import covers_name

ALL_HIGH = "high= keeps all of its products"  # why such a layer stays high


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
        return self._covers(layer.names)

    def met(self, row: Row) -> bool:
        """Whether it applied to a layer of a report: one in FP8, or that would be if switches had not kept it whole."""
        return (row.recipe is not None or row.reason == ALL_HIGH) and self._covers((row.name, *row.aliases))

    def _covers(self, names: Sequence[str]) -> bool:
        chosen = [glob for glob in self.sites if not glob.startswith("!")] or ["*"]
        left_out = [glob.removeprefix("!") for glob in self.sites if glob.startswith("!")]
        return any(covers_name(glob, name) for glob in chosen for name in names) and not any(
            covers_name(glob, name) for glob in left_out for name in names
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
        return None, ALL_HIGH
    return recipe, described(recipe)
