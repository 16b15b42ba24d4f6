"""Parameters that Megatron-Core has cut, a share for each rank of a group; it marks them, and all others are copies.

    p.tensor_model_parallel     True: this rank's share, of the group's; else the same on all of its ranks
    p.allreduce                 False: an expert's, of which each rank of the group has its own, cut or whole

Source: Megatron-Core, `tensor_parallel/layers.py` (`param_is_not_tensor_parallel_duplicate`), `parallel_state.py`.
"""

from __future__ import annotations

import sys

from torch import Tensor

from narrowgauge.session.tensors.sharded import members

PLACE = "megatron.core.parallel_state"


def group_of(p: Tensor) -> list[int]:
    """The ranks that have each its own part of `p`; none if all have the same, or nobody says which they are."""
    state = sys.modules.get(PLACE)
    if state is None or not (getattr(p, "tensor_model_parallel", False) or is_experts(p)):
        return []
    ask = getattr(state, "get_tensor_model_parallel_group", None)
    try:
        ranks = members(None if ask is None else ask())
    except (AssertionError, RuntimeError, ValueError):  # it was never set up, or is no more
        return []
    return ranks if len(ranks) > 1 else []


def is_experts(p: Tensor) -> bool:
    """Whether it is an expert's, which no other rank of the group has, cut or whole."""
    return PLACE in sys.modules and not getattr(p, "allreduce", True)
