"""Where the gradient of a product's result arrives, and who else has the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.session.tensors.sharded import Held, holders, is_distributed

_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def at_gradient(y: Tensor, arrived: Callable[..., None], *known: Any) -> None:
    """Have `arrived` called with what is `known` and the gradient of y that the product is given, unseen by modes.

    Hooks of the program on y itself may change it, and come after ours: so not on y, but at what made it.
    """
    node, number = y.grad_fn, y.output_nr
    if node is None:
        y.register_hook(lambda dy: unseen_by_modes(arrived, *known, dy))
    else:
        node.register_prehook(partial(_arrive, number, arrived, known))


@partial(passed_over, below=True)
def _arrive(
    number: int, arrived: Callable[..., None], known: tuple[Any, ...], gradients: Sequence[Tensor | None]
) -> None:
    dy = gradients[number]
    if type(dy) is Tensor and not _modes() and not _function_modes():
        arrived(*known, dy)
    elif dy is not None:
        unseen_by_modes(arrived, *known, dy)


def made_as(y: Tensor) -> Tensor:
    """The tensor of which y is another view, element by element in the same order; y itself if there is none.

    Rows are made as a matrix and seen as [..., N]. Once the program changes y in place it is another view, and no
    gradient comes by where it was.
    """
    base = y._base if type(y) is Tensor and not y.is_nested and y._is_view() else None
    same = base is not None and base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous()
    return base if base is not None and same and base.grad_fn is not None else y


def copied_output(weight: Tensor | None, x: Held, output: Tensor) -> int | None:
    """The lowest rank that has the same output, where the output itself does not say.

    A row-wise parallel layer, whose weight is cut along the contracted dimension, sums its output over the ranks: each
    has all of it, unless it was scattered again, and then there are fewer rows than in the input.
    """
    if weight is None or not is_distributed(weight) or is_distributed(output) or x.tensor is None:
        return None
    cut = [placement.is_shard(1) for placement in weight.placements]  # type: ignore[attr-defined]
    if not any(cut) or output.shape[:-1] != x.tensor.shape[:-1]:
        return None
    return holders(weight.device_mesh, cut)[0]  # type: ignore[attr-defined]
