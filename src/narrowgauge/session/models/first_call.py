"""A linear layer that is converted as it is being called: the first call of a model that is one layer, say.

torch has looked up its `forward` by then. So the product that this call makes of the layer's own weight is made by the
forward that the layer has now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


def reroute(layer: nn.Module) -> Callable[[], None]:
    """Have the layer's next `F.linear` made by its present forward; returns what undoes it, which it does itself."""
    original, waits = F.linear, True

    def undo() -> None:
        nonlocal waits
        waits = False
        if F.linear is linear:
            F.linear = original

    def linear(*args: Any, **kwargs: Any) -> Tensor:
        if not waits or len(args) < 2 or args[1] is not layer._parameters.get("weight"):
            return original(*args, **kwargs)
        undo()
        made: Tensor = layer.forward(args[0])
        return made

    F.linear = linear
    return undo
