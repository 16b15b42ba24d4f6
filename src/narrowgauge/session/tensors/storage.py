"""The memory of a tensor, which its views share, and which some tensors do not have."""

from __future__ import annotations

from torch import Tensor, UntypedStorage


def storage_of(x: Tensor) -> UntypedStorage | None:
    """None for tensors that have none of their own: sparse ones, and some that wrap others."""
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
