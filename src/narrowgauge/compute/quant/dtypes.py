"""Which torch dtype stores the codes of which format.

    E4M3FN -> torch.float8_e4m3fn        E4M3FNUZ -> torch.float8_e4m3fnuz
    E5M2   -> torch.float8_e5m2          E5M2FNUZ -> torch.float8_e5m2fnuz

E8M0 stores scales and E2M1 packs two codes per byte: neither is an element format of a QTensor yet.
"""

from __future__ import annotations

import torch

from narrowgauge.errors import FormatError
from narrowgauge.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Format

TORCH_DTYPES = {
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E4M3FNUZ: torch.float8_e4m3fnuz,
    E5M2FNUZ: torch.float8_e5m2fnuz,
}
_FORMATS = {dtype: fmt for fmt, dtype in TORCH_DTYPES.items()}


def torch_dtype(fmt: Format) -> torch.dtype:
    """Return the dtype that stores codes of `fmt`; FormatError if tensors cannot be quantized to it."""
    dtype = TORCH_DTYPES.get(fmt)
    if dtype is None:
        known = ", ".join(f.name for f in TORCH_DTYPES)
        if not isinstance(fmt, Format):
            raise FormatError(f"{fmt!r} is no format; expected one of narrowgauge.formats: {known}.")
        raise FormatError(f"tensors cannot be quantized to {fmt.name}; expected one of {known}.")
    return dtype


def format_of(dtype: torch.dtype) -> Format:
    """Return the format whose codes `dtype` stores; FormatError if it is no 8-bit float."""
    fmt = _FORMATS.get(dtype)
    if fmt is None:
        known = ", ".join(str(d) for d in TORCH_DTYPES.values())
        raise FormatError(f"{dtype} stores no codes; expected one of {known}.")
    return fmt
