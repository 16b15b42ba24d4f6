"""numpy scalars in a torch checkpoint: a `loss`, a `best_acc`. They are no tensors, but may be keys.

    scalar(dtype("f8", False, True) with a state, bytes)    how numpy pickles one, under the name of numpy 1 or of 2

numpy's own functions take objects, records, flags and subclasses from a file as well. So stand-ins are found under
their names, which take what a plain scalar has and refuse the rest.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_PLAIN = re.compile(r"[biufcSUmM]\d+")  # numbers, truth values, texts, times; no objects, no records


class Dtype:
    """What `numpy.dtype` gives. Raises ValueError of anything that is not a plain scalar's."""

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:
        if not isinstance(code, str) or not _PLAIN.fullmatch(code):
            raise _refused("numpy.dtype")
        self.code, self.order = code, "="

    def __setstate__(self, state: object) -> None:
        """Only the byte order; the rest of a plain scalar's is in its code."""
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "=", "|"):
            raise _refused("numpy.dtype")
        self.order = order


def scalar(dtype: object, data: object) -> Any:
    """The scalar that these bytes are; of times, the count. Raises ValueError if they are none."""
    if not isinstance(dtype, Dtype) or not isinstance(data, bytes):
        raise _refused("numpy.core.multiarray.scalar")
    kind = dtype.code.replace("m", "i").replace("M", "i")
    (value,) = np.frombuffer(data, np.dtype(dtype.order + kind))
    return value


def _refused(name: str) -> ValueError:
    """In torch's words for a name that it does not know."""
    return ValueError(f"unsupported GLOBAL {name}")


# For `torch.serialization.safe_globals`.
STAND_INS: list[Any] = [
    (Dtype, "numpy.dtype"),
    (scalar, "numpy.core.multiarray.scalar"),
    (scalar, "numpy._core.multiarray.scalar"),
]
