"""A product of a nested tensor: that of the rows of all its pieces, one after the other, and nested again.

    x  pieces [T_1, K], ..., [T_B, K]  ->  [T_1 + ... + T_B, K]  ->  [T_1 + ... + T_B, N]  ->  y  pieces [T_i, N]

So all pieces share the scales that a dense batch of the same rows would have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def product_of_pieces(product: Callable[[Tensor], Tensor], x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product` of the rows of x, nested as x is; what F.linear refuses (holes, another ragged axis) it refuses."""
    if x.layout is not torch.jagged:
        pieces = x.unbind()
        rows = product(torch.cat(pieces))
        return torch.nested.as_nested_tensor(list(rows.split([len(piece) for piece in pieces])))
    if x.lengths() is not None or x._ragged_idx != 1:
        return F.linear(x, weight, bias)
    # torch's public way to nest rows logs a warning. The offsets are x's own: by them torch knows that y may be added
    # to x; and so are the lengths that are known, which attention would else ask the device for.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets

    nested: Tensor = nested_view_from_values_offsets(
        product(x.values()), x.offsets(), min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
    )
    return nested
