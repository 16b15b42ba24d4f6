"""Where the parts of a weight [N, K] are: what a DTensor says of it at rest, and what of it a product will see.

A mesh of ranks has one dimension or several, and along each the weight is cut or copied:

    at rest                                in use                       by
    [Shard]                                whole, a plain tensor        fully_shard
    [Replicate, Shard]                     whole, a plain tensor        fully_shard on two dimensions
    [Shard(0)], [Shard(1)], [Replicate]    as it is: these parts        parallelize_module
    [Shard, ..., Shard(0 or 1)]            cut by the last one only     both: FSDP2 gathers along the leading dimensions
    a plain tensor, empty, `ds_shape`      whole, a plain tensor        DeepSpeed's ZeRO 3

Legend: N = output features, K = input features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

Place = tuple[int | None, int]  # the dimension that is cut (None: all have all of it), and into how many parts


def is_distributed(x: Any) -> bool:
    """Whether `x` is a DTensor; a program that has none need not import them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def some_are_distributed() -> bool:
    """Whether this program may have DTensors at all; torch imports them by itself, to clip gradients, say."""
    return "torch.distributed.tensor" in sys.modules and dist.is_initialized()


def is_partitioned(weight: Tensor | None) -> bool:
    """Whether DeepSpeed's ZeRO 3 has cut this parameter, which is empty but while its layer runs."""
    return hasattr(weight, "ds_shape")


def gathered_modules(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the modules that lie in one on which `fully_shard` was called."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if fsdp is None:
        return set()
    return {id(part) for module in modules if isinstance(module, fsdp) for part in module.modules()}


def places_in_use(weight: Tensor, *, gathered: bool) -> list[Place] | None:
    """How a DTensor weight is cut where it is multiplied; None for a way that no product here is known for."""
    placements, mesh = list(weight.placements), weight.device_mesh  # type: ignore[attr-defined]
    first = 0
    if gathered:
        first = next((i for i, placement in enumerate(placements) if not placement.is_replicate()), -1) + 1
    found: list[Place] = []
    for i in range(first, len(placements)):
        if placements[i].is_replicate():
            found.append((None, 1))
        elif placements[i].is_shard():
            found.append((placements[i].dim % weight.dim(), mesh.size(i)))
        else:
            return None
    return found


def refusal(weight: Tensor, *, gathered: bool) -> str | None:
    """Why a layer with this DTensor weight [N, K] cannot run in FP8, or None."""
    places = places_in_use(weight, gathered=gathered)
    if places is None:
        return f"its weight is laid out as {weight.placements}; Shard and Replicate can be multiplied"  # type: ignore[attr-defined]
    for dim, parts in places:
        if dim is not None and weight.shape[dim] % parts:
            which = "outputs" if dim == 0 else "inputs"
            return f"its {weight.shape[dim]} {which} cannot be divided evenly by {parts} ranks"
    return None


def shape_in_use(weight: Tensor, shape: tuple[int, int], *, gathered: bool) -> tuple[int, int]:
    """(N, K) of the matrix that one rank multiplies, for a layer of `shape`."""
    sizes = list(shape)
    for dim, parts in (places_in_use(weight, gathered=gathered) or []) if is_distributed(weight) else []:
        if dim is not None:
            sizes[dim] //= parts
    return sizes[0], sizes[1]


def holders(mesh: Any, everywhere: list[bool]) -> tuple[int | None, int]:
    """The lowest of the ranks that hold what this one holds, because all along some dimensions do, and their number."""
    place = mesh.get_coordinate()
    if place is None:
        return None, 1
    same = mesh.mesh[tuple(slice(None) if free else at for free, at in zip(everywhere, place, strict=True))]
    return int(same.min()), int(same.numel())
