"""torchao's `Float8Linear`: the casts that it makes, by its own configuration.

    tensorwise    inv_scale = max / max(amax, 1e-12)     per tensor, as our rule ROWWISE has it, but for a whole tensor
    axiswise      the same, one per row of the operand of the product that is shown (fprop, or dgrad for grad_output)
    disabled      not cast; where the other product of the operand casts it as a whole tensor, that is shown

torchao divides in float64 and rounds to float32, which is one correct rounding, as ours is. Its `_scale` multiplies
towards FP8: our inv_scale. So the codes are its own, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.compute.quant import ROWWISE, ROWWISE_POW2, Granularity, PerRow, PerTensor
from narrowgauge.compute.quant.dtypes import format_of
from narrowgauge.session.sites.part import Part, Product, Rule, first_tensor, is_a, operand, output_of
from narrowgauge.session.sites.torchao_casts import OVER_RANKS

CASTS = {  # the configuration's words for the operands of each product
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_grad_output_for_grad_weight", "cast_config_input_for_grad_weight"),
}
_SECOND = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}
_GRANULARITIES: dict[str, Granularity] = {"tensorwise": PerTensor(), "axiswise": PerRow()}
MOST = 1024  # rules remembered: a program mostly has one configuration, and could make one for each layer
_KNOWN: dict[tuple[int, str], tuple[Any, Rule]] = {}  # by the ids of configurations, each with its own


class TorchAO:
    """`torchao.float8.float8_linear.Float8Linear`."""

    whole = in_graph = True
    as_autocast = True  # casts its input as autocast says, on whichever device
    heard = OVER_RANKS.heard

    def knows(self, module: nn.Module) -> bool:
        """Known by its name."""
        return is_a(module, "torchao", "Float8Linear")

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """One product; its input cast as the layer casts it under autocast, on whichever device."""
        x = first_tensor(args, kwargs, "input")
        if x is not None and torch.is_autocast_enabled("cuda"):
            x = x.detach().to(torch.get_autocast_dtype("cuda"))
        own = partial(_rule, module.config)
        return (Part(x, module._parameters.get("weight"), output_of(output), own=own, by_cast=OVER_RANKS.show),)

    def product(self, module: nn.Module, x: Tensor) -> Product | None:
        """The shorter way of `parts`."""
        w = module._parameters.get("weight")
        return None if w is None or torch.is_autocast_enabled("cuda") else (w, partial(_rule, module.config))


def _rule(config: Any, role: OperandRole, x_MK: Tensor) -> Rule | str:
    """Found once: asking a configuration takes longer than what is counted by its answer, which cannot change."""
    known = _KNOWN.get((id(config), role))
    if known is not None and known[0] is config:
        return known[1]
    rule = _rule_of(config, role)
    if isinstance(rule, Rule) and _is_frozen(config):
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[id(config), role] = config, rule
    return rule


def _is_frozen(config: Any) -> bool:
    return all(
        getattr(getattr(type(of), "__dataclass_params__", None), "frozen", False)
        for of in (config, *(getattr(config, name, None) for pair in CASTS.values() for name in pair))
    )


def _rule_of(config: Any, role: OperandRole) -> Rule | str:
    cast = getattr(config, f"cast_config_{role}")
    if cast.scaling_type.value == "disabled":
        cast = getattr(config, f"cast_config_{role}_for_{_SECOND[role]}")
        if cast.scaling_type.value == "disabled":
            return f"torchao leaves the {role} of a Float8Linear in high precision; it is not recorded."
        if cast.scaling_granularity.value != "tensorwise":
            return f"torchao casts the {role} of a Float8Linear only for its second product, by column; not recorded."
    granularity = _GRANULARITIES.get(cast.scaling_granularity.value)
    if granularity is None:
        return f"torchao scales the {role} of a Float8Linear by {cast.scaling_granularity}, which is unknown here."
    scaling = ROWWISE_POW2 if config.round_scales_to_power_of_2 else ROWWISE
    return Rule(operand(format_of(cast.target_dtype), granularity, scaling))
