"""The recipes that ship, as data, each with its source.

            scale per                        formats (fwd / grad)   rule
CURRENT     tensor                           E4M3FN / E5M2          max / amax, now
DELAYED     tensor                           E4M3FN / E5M2          max / max(amax of the last 1024 steps)
STATIC      tensor                           E4M3FN / E5M2          a table, or the first tensor seen
ROWWISE     row of each gemm operand         E4M3FN                 max / amax of the row
BLOCKWISE   1x128, weights 128x128           E4M3FN                 2^floor(log2(max / amax))
MXFP8       1x32                             E4M3FN                 E8M0, rounded up: never saturates
MXFP8_OCP   1x32                             E4M3FN                 E8M0, floor as in the OCP text: saturates
"""

from __future__ import annotations

import re
from types import MappingProxyType

from narrowgauge.compute import quant
from narrowgauge.compute.recipes.recipe import Gemm, Operand, Recipe, fake
from narrowgauge.errors import RecipeError, nearest
from narrowgauge.formats import E4M3FN, E5M2

_TENSOR_FWD = Operand(E4M3FN, quant.PerTensor(), quant.CURRENT)
_TENSOR_GRAD = Operand(E5M2, quant.PerTensor(), quant.CURRENT)
# Nothing accumulates short. Hopper's fast accumulator keeps about 14 bits and drops what lies below, so sums of one
# sign come out too small: by 2.7% for 8,192 terms behind a SwiGLU. It would save half a percent of a step.
_FPROP = Gemm(_TENSOR_FWD, _TENSOR_FWD)
_GRAD = Gemm(_TENSOR_GRAD, _TENSOR_FWD)
_ROW = Operand(E4M3FN, quant.PerRow(), quant.ROWWISE)
_TILE = Operand(E4M3FN, quant.BLOCK_1x128, quant.CURRENT_POW2)
_SQUARE = Operand(E4M3FN, quant.BLOCK_128x128, quant.CURRENT_POW2)
_MX = Operand(E4M3FN, quant.BLOCK_1x32, quant.E8M0_UP)
_MX_OCP = Operand(E4M3FN, quant.BLOCK_1x32, quant.E8M0_OCP)

CURRENT = Recipe(
    name="current",
    fprop=_FPROP,
    dgrad=_GRAD,
    wgrad=_GRAD,
    source="TransformerEngine Float8CurrentScaling; torchao float8 tensorwise",
    description=(
        "One scale per tensor, from the tensor's own amax, at the moment it is quantized. Nothing to tune "
        "and no state to save; one extra read of every operand. The default, and the first to try."
    ),
)
DELAYED = Recipe(
    name="delayed",
    fprop=_FPROP,
    dgrad=_GRAD,
    wgrad=_GRAD,
    state="delayed",
    source="FP8 Formats for Deep Learning (arXiv:2209.05433); TransformerEngine DelayedScaling",
    description=(
        "One scale per tensor, from the largest amax of the last steps, so that quantizing needs no "
        "reduction first. Cheap and good while amaxes are steady; a jump saturates until the history has "
        "seen it (normal numbers that jump by four have some 10 dB of SQNR in that step)."
    ),
)
STATIC = Recipe(
    name="static",
    fprop=_FPROP,
    dgrad=_GRAD,
    wgrad=_GRAD,
    state="static",
    history=1,
    source="FP8 Formats for Deep Learning (arXiv:2209.05433); μnit Scaling (arXiv:2502.05967)",
    description=(
        "One fixed scale per tensor, from a table or from the first tensor seen, renewed every "
        "`refresh_every` steps. For models whose amaxes are known to stay put, and for replaying the "
        "scales of another run."
    ),
)
ROWWISE = Recipe(
    name="rowwise",
    fprop=Gemm(_ROW, _ROW),
    dgrad=Gemm(_ROW, _ROW),
    wgrad=Gemm(_ROW, _ROW),
    source="torchao float8 rowwise; FBGEMM f8f8bf16_rowwise",
    description=(
        "One scale per row of each gemm's operand (per token, per output feature, ...), E4M3 everywhere. "
        "An outlier token or feature costs only its own row. Input, weight and gradient are each "
        "quantized twice."
    ),
)
BLOCKWISE = Recipe(
    name="blockwise",
    fprop=Gemm(_TILE, _SQUARE),
    dgrad=Gemm(_TILE, _SQUARE),
    wgrad=Gemm(_TILE, _TILE),
    source="DeepSeek-V3 technical report, section 3.3; TransformerEngine Float8BlockScaling",
    description=(
        "One power-of-two scale per 1x128 tile of activations and gradients and per 128x128 block of "
        "weights, E4M3 everywhere, accumulation promoted every 128 products. Confines outliers; the "
        "safest of the Hopper recipes."
    ),
)
MXFP8 = Recipe(
    name="mxfp8",
    fprop=Gemm(_MX, _MX),
    dgrad=Gemm(_MX, _MX),
    wgrad=Gemm(_MX, _MX),
    source="OCP Microscaling Formats 1.0; rounding up: Pre-training LLMs with MXFP8 (arXiv:2506.08027)",
    description=(
        "One E8M0 scale per 32 values along the contracted dimension, rounded up so that nothing "
        "saturates; row and column copies are both quantized from high precision. Native on Blackwell, "
        "emulated here."
    ),
)
MXFP8_OCP = Recipe(
    name="mxfp8-ocp",
    fprop=Gemm(_MX_OCP, _MX_OCP),
    dgrad=Gemm(_MX_OCP, _MX_OCP),
    wgrad=Gemm(_MX_OCP, _MX_OCP),
    source="OCP Microscaling Formats 1.0, section 6.3",
    description=(
        "MXFP8 with the scale rule that the OCP text gives, which rounds down and saturates 17% of "
        "Gaussian blocks. Kept to show why not."
    ),
)

CATALOG = MappingProxyType(
    {recipe.name: recipe for recipe in (CURRENT, DELAYED, STATIC, ROWWISE, BLOCKWISE, MXFP8, MXFP8_OCP)}
)


def by_name(name: str) -> Recipe:
    """Return the recipe called `name`, any case, "_" or "-"; "fake-" in front gives its fake.

    Raises RecipeError with the nearest match.
    """
    key = name.strip().casefold().replace("_", "-")
    if key.startswith("fake-") and key[5:] in CATALOG:
        return fake(CATALOG[key[5:]])
    if key not in CATALOG:
        bits = re.findall(r"\d+", key)
        other = bits and "8" not in bits  # 4 bits are no misspelt 8
        near = f"all are of 8 bits: {', '.join(sorted(CATALOG))}." if other else nearest(key, CATALOG)
        raise RecipeError(f"no recipe is called {name!r}; {near}")
    return CATALOG[key]
