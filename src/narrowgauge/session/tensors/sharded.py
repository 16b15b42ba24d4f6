"""What of a tensor this process holds, and which ranks hold the same values.

    plain Tensor              all of it; who else has it, it does not say
    DTensor, Shard(d)         a part: the ranks' parts together are the tensor
    DTensor, Replicate()      a copy: every rank of that dimension of the mesh has the same values
    DTensor, Partial()        a summand: no statistic of it says anything of the sum
    Tensor with `ds_shape`    DeepSpeed's ZeRO 3: empty between its uses, all of it while its layer runs

Copies and meshes are named by the lowest rank that has them. A 2 x 2 mesh with placements (Replicate, Shard(0)):

    ranks  0 1      holds  a b      named  0 1      mesh  0 0
           2 3             a b             0 1            0 0

Of ranks outside of its mesh a DTensor says nothing: of a layer that is cut over {0, 1} and, the same layer again, over
{2, 3}, only the values tell that there are two of it.

A weight that FSDP2 shards is whole while its layer runs: then it is a copy on every rank that it was gathered from, and
its bits are those that are multiplied. Between its uses it is a part. Nothing here starts a collective, or waits on the
host for one that the program started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgauge.compute.nn.parallel.placements import holders, is_distributed
from narrowgauge.session.tensors.storage import storage_of

__all__ = [
    "Held",
    "class_name",
    "copied_by",
    "here",
    "holders",
    "is_distributed",
    "local_of",
    "lowest",
    "members",
    "mesh_size",
    "used_of",
    "wrapped_over",
]

PLAIN = frozenset((Tensor, nn.Parameter))  # of these nothing has to be asked
WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
)


class Held(NamedTuple):
    """The part of a tensor that is here.

    Args:
        tensor: a plain tensor; None if what is here is only a summand.
        first: the lowest rank that holds the same values; None if nobody else is known to.
        copies: how many ranks hold the same values.
        mesh: the lowest rank of those of which all this is known; None if nothing is.
    """

    tensor: Tensor | None
    first: int | None = None
    copies: int = 1
    mesh: int | None = None


def local_of(x: Tensor) -> Held:
    """What this process holds of `x`; the result shares its memory and needs no gradient."""
    if type(x) in PLAIN:
        return Held(x.detach() if x.requires_grad or type(x) is not Tensor else x)
    x = _waited(_beneath(x).detach())
    if not is_distributed(x):
        return Held(_unwrapped(x))
    placements = x.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        return Held(None)
    local = _unwrapped(_waited(x.to_local()))  # type: ignore[attr-defined]
    everywhere = [placement.is_replicate() for placement in placements]
    known = holders(x.device_mesh, everywhere) if any(everywhere) else (None, 1)  # type: ignore[attr-defined]
    return Held(local, *known, lowest(x.device_mesh))  # type: ignore[attr-defined]


def used_of(used: Tensor, kept: Tensor | None) -> Held:
    """What a layer multiplies by, `used`, when between its uses the same parameter is `kept`.

    FSDP2 gathers over the leading dimensions of the mesh of `kept`; what is left of it is the mesh of `used`.
    """
    held = local_of(used)
    if kept is None or kept is used or not is_distributed(kept) or held.tensor is None:
        return held
    mesh = kept.device_mesh  # type: ignore[attr-defined]
    rest = list(used.placements) if is_distributed(used) else []  # type: ignore[attr-defined]
    if len(rest) == mesh.ndim:  # it was not gathered
        return held
    gathered = [True] * (mesh.ndim - len(rest)) + [placement.is_replicate() for placement in rest]
    return Held(held.tensor, *holders(mesh, gathered), lowest(mesh))


def lowest(mesh: Any) -> int:
    """The lowest rank of a mesh."""
    return int(mesh.mesh.min())


def mesh_size(x: Tensor) -> int:
    """Over how many ranks `x` is known to be spread, or to be the same."""
    return int(x.device_mesh.size()) if is_distributed(x) else 1  # type: ignore[attr-defined]


def here(x: Tensor) -> Tensor:
    """The plain tensor behind `x` that this process has, whatever it is of the whole; its gradient is as it was."""
    if type(x) is Tensor:
        return x
    x = _waited(_beneath(x))
    return _waited(x.to_local()) if is_distributed(x) else x  # type: ignore[attr-defined]


def shape_of(p: Tensor) -> tuple[int, ...]:
    """The shape of a parameter as a whole, also where ZeRO 3 left nothing of it here.

    Of one that a lazy module makes in its first call, as if it were empty.
    """
    return (0,) if is_lazy(p) else tuple(getattr(p, "ds_shape", p.shape))


def copied_by(modules: Iterable[nn.Module]) -> int | None:
    """The lowest rank with the same weights, if one of these wrappers keeps them the same: DDP, or FSDP1 in use."""
    return min(wrapped_over(modules), default=None)


def wrapped_over(modules: Iterable[nn.Module]) -> list[int]:
    """The ranks that the first of such wrappers among these modules is for; none without one."""
    for module in modules:
        for where, name in WRAPPERS:
            kind = getattr(sys.modules.get(where), name, None)
            if kind is not None and isinstance(module, kind):
                return members(module.process_group)
    return []


def members(group: Any) -> list[int]:
    """The ranks of a process group; none if it is none, this rank is not in it, or it was destroyed."""
    if not isinstance(group, dist.ProcessGroup):
        return []
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:  # torch knows it no more, though a layer still has it
        return []


def class_name(module: nn.Module) -> str:
    """The name of a module's class, as its author wrote it: FSDP2 puts others in front and calls it `FSDP<name>`."""
    kind = type(module)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if fsdp is not None and isinstance(module, fsdp):
        kind = next((base for base in kind.__bases__ if not issubclass(base, fsdp)), kind)
    return kind.__name__


def _beneath(x: Tensor) -> Tensor:
    """The memory of a tensor of the program's own class as a plain one, if it has any: its class hears nothing of it.

    What wraps other tensors (DTensor, torchao's, a nested one) has none, and says itself what is in there.
    """
    if type(x) in PLAIN or is_distributed(x) or x.is_nested:
        return x
    memory = storage_of(x)
    if memory is None or memory.data_ptr() == 0:
        return x
    with torch._C._DisableTorchDispatch():
        return x.detach().requires_grad_(x.requires_grad) if x.is_leaf else x.view_as(x)


def _unwrapped(x: Tensor) -> Tensor:
    """The tensor that torchao put into one of its own, for FSDP2 to cast it as it gathers it; else x."""
    return x._tensor.detach() if type(x).__name__ == "WeightWithDynamicFloat8CastTensor" else x  # type: ignore[attr-defined]


def _waited(x: Tensor) -> Tensor:
    """The tensor behind one whose collective runs; the device waits for it, the host does not."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(x, module.AsyncCollectiveTensor):
        waited: Tensor = x.trigger_wait()
        return waited
    return x
