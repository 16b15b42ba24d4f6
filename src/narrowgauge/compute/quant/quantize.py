"""quantize: from a high-precision tensor to codes and scale.

    amax_g   = max |x| over granule g
    inv_scale = rule(amax_g)                                see scaling
    codes    = cast(clamp(x · inv_scale, -max, +max))       to nearest, ties to even, all in float32
    scale    = 1 / inv_scale, or NaN where amax_g is not finite

The clamp comes before the cast because casts disagree about overflow (see formats.codec). It would hide an
Inf, so the scale carries the bad news instead. Codes keep the memory layout of x: a transposed view gives
transposed codes.

Legend: M = rows (all leading dimensions, flattened), K = the last dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.compute.quant.dtypes import torch_dtype
from narrowgauge.compute.quant.granularity import Granularity, PerTensor
from narrowgauge.compute.quant.qtensor import QTensor
from narrowgauge.compute.quant.scaling import CURRENT, FLOAT32_MAX, Scaling, inv_scale_from_amax
from narrowgauge.errors import FormatError, ShapeError, UsageError
from narrowgauge.formats import Format

SCALE_MIN = 2.0**-128  # the least scale whose reciprocal is a float32


def quantize(
    x: Tensor,
    fmt: Format,
    granularity: Granularity = PerTensor(),  # noqa: B008  (frozen, without fields)
    *,
    scaling: Scaling = CURRENT,
    scale: float | Tensor | None = None,
    inv_scale: Tensor | None = None,
    margin: int = 0,
    amax: Tensor | None = None,
) -> QTensor:
    """Quantize `x` [..., K] to a QTensor of shape [M, K], M being the product of the leading dimensions.

    `scale` given: it is used as it is (a float for all granules, or a tensor of the granularity's scale
    shape) and `scaling` and `margin` are not. `inv_scale` given beside it: the factor whose reciprocal `scale`
    is, so that it is not rounded twice. `amax` given: `granularity.amax` of this same x, to save its
    being computed twice. Raises FormatError for a dtype or format that cannot be quantized, ShapeError for
    shapes that do not fit, UsageError for a scale that is no positive float32, and for what is no tensor, no
    granularity or no scaling.
    """
    dtype = torch_dtype(fmt)
    given_MK = as_matrix(x)
    if not isinstance(granularity, Granularity):
        raise UsageError(
            f"{granularity!r} is no granularity; expected PerTensor(), PerRow(), PerColumn() or Block(rows, cols)."
        )
    if not isinstance(scaling, Scaling):
        raise UsageError(
            f"{scaling!r} is no scaling; expected CURRENT, ROWWISE or another of narrowgauge.compute.quant."
        )
    x_MK = given_MK.float()
    shape = (x_MK.shape[0], x_MK.shape[1])
    scale_shape = granularity.scale_shape(shape)
    if amax is None:
        amax = granularity.amax(x_MK)
    elif tuple(amax.shape) != scale_shape:
        raise ShapeError(f"{granularity} of {list(shape)} needs amax of {list(scale_shape)}, found {list(amax.shape)}.")
    if scale is not None:
        scale = _given_scale(scale, scale_shape, x.device)
    scale, inv_scale = scales_for(amax, fmt, scaling, margin, scale, inv_scale)
    # A converted copy is ours to overwrite; the caller's own float32 is not.
    scaled = torch.empty_like(x_MK) if x_MK is given_MK else x_MK
    granularity.multiply(x_MK, inv_scale, out=scaled)
    codes = scaled.clamp_(-fmt.max, fmt.max).to(dtype)
    return QTensor(codes, scale, fmt, granularity)


def scales_for(
    amax: Tensor,
    fmt: Format,
    scaling: Scaling = CURRENT,
    margin: int = 0,
    scale: Tensor | None = None,
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scale and inv_scale of granules with these amaxes, or of these under a given scale (and inv_scale).

    A granule whose amax or given scale is no number has the scale NaN. Its inv_scale is 1, unless a healthy one was
    given: what a given scale makes of x depends on no amax, so that a kernel need not know it before it writes codes.
    """
    healthy = amax < torch.inf  # False for NaN too
    if scale is None:
        inv_scale = inv_scale_from_amax(amax, fmt, scaling, margin)
        scale = inv_scale.reciprocal()
    else:
        usable = (scale > 0) & (scale < torch.inf)
        if inv_scale is None:
            inv_scale = scale.reciprocal().clamp(max=FLOAT32_MAX)
        inv_scale = torch.where(usable, inv_scale, 1.0)
        healthy = healthy & usable
    return torch.where(healthy, scale, torch.nan), inv_scale


def as_matrix(x: Tensor) -> Tensor:
    """Return `x` [..., K] as a detached matrix [M, K]; a vector is one row."""
    if not isinstance(x, Tensor):
        raise UsageError(f"quantize takes a torch tensor, found a {type(x).__name__}; torch.as_tensor makes one of it.")
    if not x.is_floating_point() or x.element_size() == 1:
        raise FormatError(f"quantize takes float16, bfloat16, float32 or float64, found {x.dtype}.")
    if x.layout is not torch.strided:
        raise FormatError(f"quantize takes a dense tensor, found {x.layout}; x.to_dense() is one.")
    if x.dim() == 0:
        raise ShapeError("quantize takes at least one dimension [..., K], found a scalar; reshape it.")
    x = x.detach()
    # reshape(-1, K) cannot infer the rows of a tensor without elements.
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _given_scale(scale: float | Tensor, scale_shape: tuple[int, ...], device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        if tuple(scale.shape) != scale_shape:
            raise ShapeError(f"the given scale has shape {list(scale.shape)}, expected {list(scale_shape)}.")
        return scale.detach().float()
    if not SCALE_MIN <= scale <= FLOAT32_MAX:
        raise UsageError(f"a scale lies between {SCALE_MIN:.3g} and {FLOAT32_MAX:.3g}, found {scale!r}.")
    return torch.full(scale_shape, scale, dtype=torch.float32, device=device)
