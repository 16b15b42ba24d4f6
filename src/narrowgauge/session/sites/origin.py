"""Which parameter a tensor is made of: `w[2].t().to(bfloat16)` is parameter w, turned.

The graph remembers: each view and cast is a node with one input, down to the leaf. Where no graph is kept, a view still
knows its base. Nothing is computed, and no device is asked.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

_DEPTH = 12  # nodes; a weight that went through more of them is no weight any more
_TURNS = ("TBackward", "TransposeBackward", "PermuteBackward")
_VIEWS_AND_COPIES = (
    "AliasBackward", "AsStridedBackward", "CloneBackward", "ExpandBackward", "IndexBackward", "IndexSelectBackward",
    "ReshapeAliasBackward", "SelectBackward", "SliceBackward", "SplitBackward", "SplitWithSizesBackward",
    "SqueezeBackward", "ToCopyBackward", "UnbindBackward", "UnsafeViewBackward", "UnsqueezeBackward", "ViewBackward",
)  # fmt: skip


class Origin(NamedTuple):
    """The parameter, and whether its last two axes are swapped in the tensor."""

    parameter: Tensor
    turned: bool


def origin(t: Tensor) -> Origin | None:
    """The parameter that `t` is, views, or is a cast or a choice of; None if it is something computed."""
    if isinstance(t, nn.Parameter):
        return Origin(t, False)
    if t.grad_fn is not None:
        return _down_the_graph(t)
    base = t._base
    if not isinstance(base, nn.Parameter) or t.dim() < 2 or base.dim() < 2:
        return None
    # A transposed view steps through memory as the other axis does.
    turned = t.shape[-1] > 1 and t.stride(-1) == base.stride(-2) and t.stride(-1) != base.stride(-1)
    return Origin(base, turned)


def _down_the_graph(t: Tensor) -> Origin | None:
    node, turned = t.grad_fn, False
    for _ in range(_DEPTH):
        if node is None:
            return None
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):  # it may also be an input that wants a gradient
            return Origin(leaf, turned) if isinstance(leaf, nn.Parameter) else None
        name = node.name().rstrip("0123456789")
        if name in _TURNS:
            turned = not turned
        elif name not in _VIEWS_AND_COPIES:
            return None
        inputs = [n for n, _ in node.next_functions if n is not None]
        if len(inputs) != 1:
            return None
        node = inputs[0]
    return None
