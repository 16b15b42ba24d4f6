"""torchao's layers: products that stay high, by torchao's own configuration.

    torchao's Float8Linear      output = x wᵀ     dx = dy w     dw = dyᵀ x
    its configuration           two casts per product, both disabled: it multiplies what it is given

A layer gets a configuration of its own, derived from the one that it has, which torchao checks as it checks any.
One operand of a product, or FP8 operands in a high product, it cannot do: that is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.compute.nn.conversion.switches import Switch
from narrowgauge.errors import ConversionError
from narrowgauge.session.sites.torchao import CASTS


def switch(layers: Sequence[Layer], switches: Sequence[Switch]) -> dict[str, str]:
    """Keep high what the switches name of these layers: layer -> which products, in words.

    Raises ConversionError for what torchao has no switch for.
    """
    chosen = {layer.name: (layer, gemms) for layer in layers if (gemms := _products(layer, switches))}
    configs: dict[tuple[int, tuple[str, ...]], Any] = {}  # layers that share a configuration go on sharing one
    for layer, gemms in chosen.values():
        module: Any = layer.module
        key = id(module.config), gemms
        configs.setdefault(key, _without(module.config, gemms, layer.name))
    for layer, gemms in chosen.values():
        module = layer.module
        module.config = config = configs[id(module.config), gemms]
        for role in ("input", "weight", "grad_output"):  # which it keeps beside it
            setattr(module, f"scaling_type_{role}", getattr(config, f"cast_config_{role}").scaling_type)
    return {name: ", ".join(f"{gemm} high" for gemm in gemms) for name, (_, gemms) in chosen.items()}


def _products(layer: Layer, switches: Sequence[Switch]) -> tuple[str, ...]:
    named = [switch for switch in switches if switch.names(layer)]
    for each in named:
        if each.roles or each.keep != "high":
            what = f"roles={list(each.roles)}" if each.roles else f"keep={each.keep!r}"
            raise ConversionError(
                f"high: {what} names {layer.name!r}, a Float8Linear of torchao, which multiplies two operands in FP8 "
                f"or two in high precision; leave {what.partition('=')[0]} out, or the layer ('!{layer.name}')."
            )
    return tuple(gemm for gemm in CASTS if any(gemm in each.gemms for each in named))


def _without(config: Any, gemms: Sequence[str], name: str) -> Any:
    """The configuration with the casts of these products disabled."""
    if getattr(config, "enable_fsdp_float8_all_gather", False) and {"fprop", "dgrad"} & set(gemms):
        raise ConversionError(
            f"high: {name!r} is a Float8Linear of torchao whose weight FSDP gathers in FP8, so only its wgrad can stay "
            "high; set enable_fsdp_float8_all_gather=False for the others."
        )
    changed = {}
    try:
        for word in (word for gemm in gemms for word in CASTS[gemm]):
            cast = getattr(config, word)
            disabled, tensorwise = type(cast.scaling_type).DISABLED, type(cast.scaling_granularity).TENSORWISE
            changed[word] = replace(cast, scaling_type=disabled, scaling_granularity=tensorwise)
        return replace(config, **changed)
    except (AttributeError, TypeError, AssertionError) as error:
        raise ConversionError(
            f"high: this version of torchao does not let {name!r} multiply {' and '.join(gemms)} in high precision "
            f"({type(error).__name__}: {error}); leave the layer out ('!{name}')."
        ) from error
