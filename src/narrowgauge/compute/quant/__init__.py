"""From tensors to codes and scales, exactly.

Read in this order: granularity (who shares a scale), scaling (amax to scale), qtensor, quantize, decode.
"""

from narrowgauge.compute.quant.decode import decode
from narrowgauge.compute.quant.dtypes import format_of, torch_dtype
from narrowgauge.compute.quant.granularity import (
    Block,
    BLOCK_1x32,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    PerColumn,
    PerRow,
    PerTensor,
)
from narrowgauge.compute.quant.qtensor import QTensor
from narrowgauge.compute.quant.quantize import quantize
from narrowgauge.compute.quant.scaling import (
    CURRENT,
    CURRENT_POW2,
    E8M0_OCP,
    E8M0_UP,
    ROWWISE,
    ROWWISE_POW2,
    Scaling,
    e8m0_bytes,
    inv_scale_from_amax,
)

__all__ = [
    "CURRENT",
    "CURRENT_POW2",
    "E8M0_OCP",
    "E8M0_UP",
    "ROWWISE",
    "ROWWISE_POW2",
    "BLOCK_1x32",
    "BLOCK_1x128",
    "BLOCK_128x128",
    "Block",
    "Granularity",
    "PerColumn",
    "PerRow",
    "PerTensor",
    "QTensor",
    "Scaling",
    "decode",
    "e8m0_bytes",
    "format_of",
    "inv_scale_from_amax",
    "quantize",
    "torch_dtype",
]
