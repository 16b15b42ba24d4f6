"""What watches or changes each of torch's operations: modes that the program has entered, tensors of its own class.

FlopCounterMode, trackers of memory      would count what is done to watch
a selective checkpoint                   keeps results of the forward by operation and number, and gives them out
                                         again when it recomputes: what is only done in the forward mixes them up
a `__torch_function__`     of a mode or of a Tensor subclass, that logs or counts, would tell of us
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.compute.nn.tracing.marks import passed_over

P = ParamSpec("P")
T = TypeVar("T")


@partial(passed_over, below=True)
def unseen_by_modes(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, whose operations no mode of the program sees, and no `__torch_function__`."""
    with torch._C.DisableTorchFunction():
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)
