"""Whether a call goes to a `__torch_function__` of the program's: of a mode that it entered, or of a Tensor subclass.

What is called is told to it, and torch looks that up by name, where a function of ours may stand. A program that asks
whether it is `F.linear` must find torch's.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.compute.nn.tracing.marks import passed_over


@passed_over
def overridden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call with these is told to the program first. `torch.set_default_device`, a mode too, says nothing."""
    modes = torch._C._len_torch_function_stack()
    if modes > 1 or (modes and getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is None):
        return True
    if torch._C._has_torch_function(args) or (kwargs and torch._C._has_torch_function(tuple(kwargs.values()))):
        return True
    for x in args:  # noqa: SIM110  a generator takes as long as all else here
        if type(x) in (tuple, list) and torch._C._has_torch_function(x):
            return True
    return False
