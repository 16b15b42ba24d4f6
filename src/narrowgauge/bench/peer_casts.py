"""torchao's casts of a layer's operands, as its own layers make them, to stand beside our quantizers.

    plain     the codes that the forward product reads, of grad_output those of dgrad
    turned    the same tensor for its second product, transposed in memory: torch's product wants one operand by columns

Where its configuration asks for one scale per tensor both are of one cast; by rows, the second is cast along columns.
On a GPU each pair is one compiled function, as torchao's users run it. Blockwise has no counterpart there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.bench.own_code import own_code
from narrowgauge.bench.peers import PEERS, check_peer
from narrowgauge.compute.recipes import ROLES
from narrowgauge.compute.recipes.recipe import Role
from narrowgauge.errors import UsageError

_SECOND: dict[str, str] = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}
READS = 2  # of x: every scale depends on all of it, or on whole rows and columns
Cast = Callable[[], tuple[Tensor, ...]]


def check_casts(subject: str, peer: str) -> None:
    """Raise UsageError unless the peer is there and `bench SUBJECT` can compare with it."""
    check_peer(peer)
    if peer != "torchao":
        raise UsageError(f"bench {subject} compares with torchao alone; for {peer} there are bench step and overhead.")


def compiled(function: Callable[..., Any], name: str, device: torch.device) -> Callable[..., Any]:
    """`function`, compiled on a GPU as one of its own."""
    if device.type != "cuda":
        return function
    made: Callable[..., Any] = torch.compile(own_code(function, name), dynamic=False)
    return made


def peer_casts(x: Tensor) -> dict[tuple[str, Role], Cast]:
    """By torchao's recipe and role: a call that casts x [M, K] for both products; codes and scale, each twice."""
    return {(recipe, role): _cast(recipe, role, x) for recipe in PEERS["torchao"] for role in ROLES}


def _cast(recipe: str, role: Role, x: Tensor) -> Cast:
    float8, tools = (importlib.import_module(f"torchao.float8{part}") for part in ("", ".float8_scaling_utils"))
    tensors = importlib.import_module("torchao.float8.float8_training_tensor")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    first = getattr(config, f"cast_config_{role}")
    second = getattr(config, f"cast_config_{role}_for_{_SECOND[role]}")
    products = tensors.LinearMMConfig()
    gemm_role = tensors.GemmInputRole[role.upper()]

    def cast(x_MK: Tensor, how: Any, along: int) -> Any:
        return tools.hp_tensor_to_float8_dynamic(
            x_MK, how.target_dtype, products, gemm_input_role=gemm_role,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=tools.get_maybe_axiswise_dim(along, how.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )  # fmt: skip

    def both(x_MK: Tensor) -> tuple[Tensor, ...]:
        plain = cast(x_MK, first, -1)
        by_rows = first.scaling_granularity.value == "axiswise"
        turned = cast(x_MK, second, 0) if by_rows or first != second else plain
        return plain._data, plain._scale, turned._data.t().contiguous(), turned._scale

    call = compiled(both, f"torchao_{recipe}_{role}", x.device)
    return lambda: call(x)
