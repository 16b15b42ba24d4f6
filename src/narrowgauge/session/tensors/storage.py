"""The memory of a tensor, which its views share, and which some tensors do not have."""

from __future__ import annotations

from torch import Tensor, UntypedStorage


def storage_of(x: Tensor) -> UntypedStorage | None:
    """None for tensors that have none of their own: sparse ones, and some that wrap others."""
    try:
        memory = x.untyped_storage()
        memory.data_ptr()  # of one that wraps others there may be a storage, which nothing is in
        return memory
    except (NotImplementedError, RuntimeError):
        return None


def address_of(x: Tensor) -> int:
    """Where it begins; 0 of tensors without memory, or without any of their own."""
    try:
        return x.data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
