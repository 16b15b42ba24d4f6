"""Parameters that are cut, a share for each rank of a group, and say no more than a mark; all others are copies.

Of Megatron-Core:

    p.tensor_model_parallel     True: this rank's share, of the tensor-parallel group's; else the same on all its ranks
    p.allreduce                 False: an expert's. Each rank of a pipeline stage has some, cut or whole, and those of
                                its expert-data-parallel group have the same
    p.shared                    True: tied to an earlier stage's (a head that is the embedding), where it counts

Of DeepSpeed's pipeline:

    p.ds_pipe_replicated        the same

Of FSDP1, which marks what it lays flat, cut or not; how its wrappers cut it is learned when the model is known:

    FULL_SHARD, SHARD_GRAD_OP    a share for each rank of the wrapper's group
    HYBRID_SHARD                 so, and several such groups have the same
    NO_SHARD                     no share: each rank has all of it

Source: Megatron-Core, `tensor_parallel/layers.py` (`param_is_not_tensor_parallel_duplicate`), `parallel_state.py`,
`transformer/module.py` (`param_is_not_shared`); DeepSpeed, `runtime/pipe/module.py` (`_index_tied_modules`); torch
2.13, `distributed/fsdp/_flat_param.py`, `_init_utils.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.session.tensors.sharded import members
from narrowgauge.session.tensors.weakly import Weak, weakly

PLACE = "megatron.core.parallel_state"
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
TIED = ((PLACE, "shared"), ("deepspeed.runtime.pipe.module", "ds_pipe_replicated"))  # who marks it, and how


class Flat(NamedTuple):
    """A parameter that FSDP1 laid flat; the ranks whose shares of it make the whole, and how many have the same."""

    p: Weak
    ranks: list[int]
    copies: int


_FLAT: dict[int, Flat] = {}  # by the parameter's id


def learn(modules: Iterable[nn.Module]) -> None:
    """Take in what FSDP1's wrappers among these modules did to parameters."""
    kind: Any = getattr(sys.modules.get(FSDP), "FullyShardedDataParallel", None)
    if kind is None:
        return
    for module in modules:
        handle = module._handle if isinstance(module, kind) else None
        if handle is None:  # all that it has is its parts' to hold
            continue
        flat = handle.flat_param
        ranks, copies = members(handle.process_group), 1
        if "HYBRID" in handle._sharding_strategy.name:
            copies = len(members(getattr(module, "_inter_node_pg", None)))
            world = list(range(dist.get_world_size()))
            ranks = world if copies * len(ranks) == len(world) else []
        elif not handle.uses_sharded_strategy:
            ranks = ranks[:1]  # it is here
        if ranks:
            known = [p for p in (flat, *(getattr(flat, "_params", None) or ())) if p is not None]
            _FLAT.update((id(p), Flat(weakly(p), ranks, copies)) for p in known)
    for at in [at for at, one in _FLAT.items() if one.p() is None]:
        del _FLAT[at]


def laid_flat(p: Tensor) -> Flat | None:
    """How FSDP1 cut `p`; None if it did not, or nobody knows how."""
    known = _FLAT.get(id(p)) if _FLAT else None
    return known if known is not None and known.p() is p else None


def group_of(p: Tensor) -> list[int]:
    """The ranks whose parts of `p` make the whole, copies among them; none if all is here, or nobody says."""
    if (flat := laid_flat(p)) is not None:
        return flat.ranks if len(flat.ranks) > 1 else []
    if PLACE not in sys.modules:  # asked of every parameter in every step
        return []
    experts, ranks = is_experts(p), []
    if experts:
        ranks = _asked("get_tensor_and_data_parallel_group", with_context_parallel=True)
    if not ranks and (experts or getattr(p, "tensor_model_parallel", False)):
        ranks = _asked("get_tensor_model_parallel_group")
    return ranks if len(ranks) > 1 else []


def some_in_groups(parameters: Sequence[Tensor]) -> bool:
    """Whether any of them has such ranks, or counts on another."""
    if (_FLAT or PLACE in sys.modules) and any(map(group_of, parameters)):
        return True
    return may_tie_stages() and any(map(counts_elsewhere, parameters))


def may_tie_stages() -> bool:
    """Whether a library is loaded that ties weights of a pipeline's stages: else no parameter has to be asked."""
    return any(where in sys.modules for where, _ in TIED)


def counts_elsewhere(p: Tensor) -> bool:
    """Whether an earlier stage of a pipeline has `p` as well, and norms of the whole have it from there."""
    return any(where in sys.modules and getattr(p, mark, False) is True for where, mark in TIED)


def copies_in_group(p: Tensor) -> int:
    """How many ranks of the group have the same part of `p`, which is marked."""
    if (flat := laid_flat(p)) is not None:
        return flat.copies
    return len(_asked("get_expert_data_parallel_group")) or 1 if is_experts(p) else 1


def is_experts(p: Tensor) -> bool:
    """Whether it is an expert's."""
    return PLACE in sys.modules and not getattr(p, "allreduce", True)


def stage_here() -> int | None:
    """This rank's place in Megatron-Core's pipeline; None where it cuts the model into no stages."""
    ranks = _asked("get_pipeline_model_parallel_group")
    return ranks.index(dist.get_rank()) if len(ranks) > 1 else None


def _asked(what: str, **how: bool) -> list[int]:
    """The ranks of one of Megatron-Core's groups."""
    ask = getattr(sys.modules.get(PLACE), what, None)
    try:
        return members(None if ask is None else ask(**how))
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it was never set up, or is no more
        return []
