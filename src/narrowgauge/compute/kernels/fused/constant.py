"""Constants that kernels use by name, cheap to launch a kernel with.

Before each launch Triton compares every global constant of a kernel with what it was when the kernel was compiled, and
its own constants are compared by making two new ones: of a kernel with twenty that takes longer than all the rest.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl


class Constant(tl.constexpr):  # type: ignore[misc]
    """A `tl.constexpr` that knows itself at a glance."""

    def __ne__(self, other: Any) -> Any:
        return False if other is self else super().__ne__(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Constant:
        return self  # it never changes, and a copy would not be known at a glance
