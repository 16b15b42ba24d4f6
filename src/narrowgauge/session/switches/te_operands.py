"""TransformerEngine's quantizers, composed so that an operand is another thing in each of its two products.

    fprop   input by rows · weight by rows
    dgrad   grad_output by rows · weight by columns        a quantizer has two directions, and each product takes one
    wgrad   grad_output by columns · input by columns      direction of each of its operands

    direction   fp8     by the layer's own quantizer: the same codes, the same scale and amax history
                high    IdentityQuantizer: the tensor as it is, in the layer's own dtype
                codes   quantized by the layer's own, and what the codes stand for, in that dtype

HybridQuantizer joins two directions. Both operands of a product are FP8, or neither is. All of these are parts that
TransformerEngine has for recipes of one's own; here they stand in the layer's slots, so that its recipe, its scaling
state and its checkpoints stay what they are.

Source: TransformerEngine 2.20, transformer_engine/pytorch/cpp_extensions/gemm.py (which product takes which direction).
"""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.compute.recipes import Recipe
from narrowgauge.compute.recipes.switched import OPERANDS
from narrowgauge.session.switches.te_parts import parts

DIRECTIONS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}


def forms(recipe: Recipe, role: str) -> tuple[str, str]:
    """What an operand is by rows and by columns, if the recipe's `high` say what stays high.

    >>> from narrowgauge.compute.recipes import CURRENT
    >>> from narrowgauge.compute.recipes.switched import switched
    >>> forms(switched(CURRENT, ["wgrad"]), "input")
    ('fp8', 'high')
    """
    by_rows, by_columns = (_form(getattr(recipe, gemm).high, gemm, role) for gemm in DIRECTIONS[role])
    return by_rows, by_columns


def _form(high: str, gemm: str, role: str) -> str:
    if high in ("", "gemm"):
        return "codes" if high else "fp8"
    return "high" if "ab"[OPERANDS[gemm].index(role)] in high else "codes"


def composed(theirs: Any, by_rows: str, by_columns: str, dtype: torch.dtype) -> Any:
    """The quantizer to put in the place of the layer's own.

    Args:
        theirs: the layer's own, which is left as it is.
        by_rows, by_columns: "fp8", "high" or "codes", as `forms` says.
        dtype: that products in high precision are made in.
    """
    ours = parts()
    if (by_rows, by_columns) == ("high", "high"):
        made = ours.Identity(dtype=dtype)
    elif (by_rows, by_columns) == ("codes", "codes"):
        made = ours.Codes(dtype=dtype)
        made.of = _child(theirs, columns=False)
    else:
        source = "rowwise_dequantized" if (by_rows, by_columns) == ("fp8", "codes") else "original"
        made = ours.Hybrid(
            rowwise_quantizer=_direction(theirs, by_rows, dtype, columns=False),
            columnwise_quantizer=_direction(
                theirs, "high" if source != "original" else by_columns, dtype, columns=True
            ),
            columnwise_source=source,
        )
        made.pin()
    made.theirs = theirs
    return made


def own(quantizer: Any) -> Any:
    """The layer's own quantizer, whose place one of ours may have."""
    theirs = getattr(quantizer, "theirs", None)
    return quantizer if theirs is None else theirs


def set_dtype(quantizer: Any, dtype: torch.dtype) -> None:
    """Have what stays high in this dtype."""
    for each in (
        quantizer,
        getattr(quantizer, "rowwise_quantizer", None),
        getattr(quantizer, "columnwise_quantizer", None),
    ):
        if isinstance(each, parts().base):
            each.dtype = dtype


def _direction(theirs: Any, form: str, dtype: torch.dtype, *, columns: bool) -> Any:
    if form == "fp8":
        return _child(theirs, columns=columns)
    made = parts().Identity(dtype=dtype) if form == "high" else parts().Codes(dtype=dtype)
    if form == "codes":
        made.of = _child(theirs, columns=False)
    return made


def _child(theirs: Any, *, columns: bool) -> Any:
    """A quantizer with the own one's state: a delayed one shares scale and amax with it."""
    child = theirs.copy()
    child.internal = False  # as a recipe's would be: what it makes may be kept for the next microbatch
    child.optimize_for_gemm = False
    child.set_usage(rowwise=not columns, columnwise=columns)
    return child
