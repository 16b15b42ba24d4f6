"""Parameters that Megatron-Core has cut, a share for each rank of a group; it marks them, and all others are copies.

    p.tensor_model_parallel     True: this rank's share, of the tensor-parallel group's; else the same on all its ranks
    p.allreduce                 False: an expert's. Each rank of a pipeline stage has some, cut or whole, and those of
                                its expert-data-parallel group have the same

Source: Megatron-Core, `tensor_parallel/layers.py` (`param_is_not_tensor_parallel_duplicate`), `parallel_state.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from narrowgauge.session.tensors.sharded import members

PLACE = "megatron.core.parallel_state"


def group_of(p: Tensor) -> list[int]:
    """The ranks whose parts of `p` make the whole, copies among them; none if all is here, or nobody says."""
    if PLACE not in sys.modules:  # asked of every parameter in every step
        return []
    experts, ranks = is_experts(p), []
    if experts:
        ranks = _asked("get_tensor_and_data_parallel_group", with_context_parallel=True)
    if not ranks and (experts or getattr(p, "tensor_model_parallel", False)):
        ranks = _asked("get_tensor_model_parallel_group")
    return ranks if len(ranks) > 1 else []


def some_in_groups(parameters: Iterable[Tensor]) -> bool:
    """Whether any of them has such ranks."""
    return PLACE in sys.modules and any(map(group_of, parameters))


def copies_in_group(p: Tensor) -> int:
    """How many ranks of the group have the same part of `p`, which is marked."""
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
