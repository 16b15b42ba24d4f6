"""QTensor: codes and the scale that multiplies them back.

    x_ij ≈ codes_ij · scale_g(i,j)         g(i,j) = the granule that holds element (i, j)

A granule whose amax was not finite is poisoned: its scale is NaN, so every gemm that touches it is NaN too,
and no clamp can hide the Inf or NaN that entered. Its codes were made with inv_scale 1.

Legend: M = rows (tokens or output features), K = columns (the contracted dimension).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.compute.quant.decode import decode
from narrowgauge.compute.quant.dtypes import torch_dtype
from narrowgauge.compute.quant.granularity import Granularity
from narrowgauge.compute.quant.scaling import FLOAT32_MAX
from narrowgauge.errors import FormatError, ShapeError
from narrowgauge.formats import Format


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized matrix: codes [M, K] in a float8 dtype, scale float32 as its granularity asks for.

    Raises FormatError when a dtype, ShapeError when a shape does not fit.
    """

    codes: Tensor
    scale: Tensor
    fmt: Format
    granularity: Granularity

    def __post_init__(self) -> None:
        expected_dtype = torch_dtype(self.fmt)
        if self.codes.dtype != expected_dtype:
            raise FormatError(f"codes of {self.fmt.name} are {expected_dtype}, found {self.codes.dtype}.")
        if self.scale.dtype != torch.float32:
            raise FormatError(f"a scale is torch.float32, found {self.scale.dtype}; use .float().")
        if self.codes.dim() != 2:
            raise ShapeError(f"codes are a matrix [M, K], found {list(self.codes.shape)}; flatten them.")
        expected_shape = self.granularity.scale_shape(self.shape)
        if tuple(self.scale.shape) != expected_shape:
            raise ShapeError(
                f"{self.granularity} of codes {list(self.codes.shape)} needs a scale of shape "
                f"{list(expected_shape)}, found {list(self.scale.shape)}."
            )
        if self.scale.device != self.codes.device:
            raise ShapeError(f"codes are on {self.codes.device}, scale is on {self.scale.device}; move one.")

    @classmethod
    def unchecked(cls, codes: Tensor, scale: Tensor, fmt: Format, granularity: Granularity) -> QTensor:
        """A QTensor by a kernel that makes what fits: on the way to a GPU, checking takes longer than launching."""
        made = object.__new__(cls)
        vars(made).update(codes=codes, scale=scale, fmt=fmt, granularity=granularity)
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix's shape (M, K)."""
        rows, cols = self.codes.shape
        return rows, cols

    @property
    def T(self) -> QTensor:
        """The transpose as a view: codes and scales swap axes, and so does the granularity."""
        scale = self.scale.t() if self.scale.dim() == 2 else self.scale
        return QTensor(self.codes.t(), scale, self.fmt, self.granularity.transposed())

    @property
    def inv_scale(self) -> Tensor:
        """The factor that the codes were made with, up to one rounding; 1 where the granule is poisoned."""
        # The scale of the largest inv_scale is subnormal, and its reciprocal would round up to Inf.
        inv_scale = self.scale.reciprocal().clamp(max=FLOAT32_MAX)
        return torch.where(self.scale.isnan(), 1.0, inv_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return codes · scale, [M, K]; multiplied in float32, then rounded to `dtype`."""
        values = decode(self.codes, torch.float32)
        return self.granularity.multiply(values, self.scale, out=values).to(dtype)
