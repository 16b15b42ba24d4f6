"""Launching a kernel again: what Triton found out about its arguments the first time is not found out again.

    kernel[(programs,)](...)       inspects all arguments and every global that the kernel names
    launch(kernel, programs, ...)  the first time the same; from then on a look into a dictionary

A compiled kernel serves all arguments of which Triton would say the same: dtypes, whether an address is a multiple of
16, whether an integer is 1 or a multiple of 16, constants. What is looked up by here is finer: the integers themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.kernels.fused.rules import INTERPRETED

MOST = 8192  # launchers remembered: sequence lengths that never come back would else pile up
_READY: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor | None],
    sizes: tuple[int, ...],
    constants: tuple[Hashable, ...],
    late: Sequence[int] = (),
    **options: int | None,
) -> None:
    """Run kernel[(programs,)](*tensors, *sizes, *late, *constants, **options) on the current device and stream.

    Args:
        kernel: a `triton.jit` function with its parameters in this order.
        programs: how many run.
        tensors: where it reads and writes; None where it does not.
        sizes: integers.
        constants: its `tl.constexpr` parameters.
        late: integers that it declares in `do_not_specialize`.
        options: of the compiler; they have to follow from sizes and constants.
    """
    if INTERPRETED:
        kernel[(programs,)](*tensors, *sizes, *late, *constants, **options)
        return
    device = torch._C._cuda_getDevice()
    places = [None if t is None else t.data_ptr() for t in tensors]
    kinds = [None if t is None else t.dtype for t in tensors]
    key = (id(kernel), device, programs, sizes, constants, *kinds, *[place and place % 16 for place in places])
    ready = _READY.get(key)
    if ready is not None:
        ready(*places, *sizes, *late, *constants, stream=torch._C._cuda_getCurrentRawStream(device))
        return
    compiled = kernel[(programs,)](*tensors, *sizes, *late, *constants, **options)
    if len(_READY) >= MOST:
        _READY.clear()
    _READY[key] = compiled[(programs, 1, 1)]
