"""Tensors that the program swaps: nothing of ours may hold them meanwhile, or torch refuses.

swapped     torch.utils.swap_tensors    what is held weakly is let go of, and taken again

When nobody watches any more, nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.tensors.weakly import let_go, let_go_of_all

_OPEN: set[int] = set()  # the seams through which it is heard, by their ids


def follow(seams: Seams) -> None:
    """Let go of what is swapped, until the seams are closed."""

    def swapping(original: Callable[..., Any]) -> Callable[..., Any]:
        def swap(*args: Any, **kwargs: Any) -> Any:
            with let_go(*(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))):
                return original(*args, **kwargs)

        return swap

    def closed() -> None:
        _OPEN.discard(id(seams))
        if not _OPEN:
            let_go_of_all()

    _OPEN.add(id(seams))
    seams.on_close(closed)
    seams.replace(torch.utils, "swap_tensors", swapping)
    seams.is_held(torch.utils, ["swap_tensors"])
