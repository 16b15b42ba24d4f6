"""What a call does beside giving a result, as its name says: it writes to a tensor, or reads one on the host.

y.add_(x)   y += x   y[i] = x   relu(y, inplace=True)   add(x, x, out=y)      write to y
x.item()   x.tolist()   float(x)                                              read x on the host
y.set_(x)   y.resize_(n)                                                      cannot be done again from a tape
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Reading a value on the host: what the script does with it afterwards cannot be seen.
READS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
# Attributes of tensors are read and written through these.
GET_GRAD = vars(torch._C.TensorBase)["grad"].__get__
SET_DATA = vars(torch._C.TensorBase)["data"].__set__
_IN_PLACE_OPERATORS = "add sub mul truediv floordiv mod pow and or xor matmul"
_IN_PLACE_DUNDERS = {f"__i{op}__" for op in _IN_PLACE_OPERATORS.split()}
# Their names say that they write, but what they change is no value.
_NO_WRITES = {"requires_grad_", "share_memory_"}
_CANNOT = {
    "set_": "replaces a tensor's storage (Tensor.set_)",
    "resize_": "resizes a tensor in place",
}


def in_place_target(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a call will write to, if its name says that it writes."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]  # type: ignore[no-any-return]
    by_name = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    by_name = by_name or name in _IN_PLACE_DUNDERS or name == "__setitem__"
    if (by_name or kwargs.get("inplace") is True) and args and isinstance(args[0], Tensor):
        return args[0]
    return None


def refusal(name: str) -> str:
    """Why a loss that depends on such a call cannot be computed again; "" if it can."""
    return f"the script {_CANNOT[name]} on the way to its loss" if name in _CANNOT else ""
