"""`nn.Linear` and what is made of it.

    nn.Linear with its own forward     input, weight, gradient of the output
    a subclass with another forward    the F.linear inside of it if there is one, which sees what is really multiplied
                                       (a weight cast, masked or merged before); else as if it were an nn.Linear

A weight that is a parameter between its uses may be another tensor in them: torch's DDP of tensor parallel layers makes
a DTensor of it, under its name, for as long as the model runs.

`Fp8Linear` shows its operands itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.session.sites.part import Part, Product, first_tensor, output_of, weight_of


class Plain:
    """`nn.Linear` as torch made it."""

    whole = in_graph = True

    def knows(self, module: nn.Module) -> bool:
        """Whether it runs nn.Linear's forward on a weight that is a parameter."""
        return (
            isinstance(module, nn.Linear)
            and not isinstance(module, Fp8Linear)
            and type(module).forward is nn.Linear.forward
            and "forward" not in vars(module)
            and module._parameters.get("weight") is not None
        )

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """One product."""
        return (Part(first_tensor(args, kwargs, "input"), _weight(module), output_of(output)),)

    def product(self, module: nn.Module, x: Tensor) -> Product | None:
        """The shorter way of `parts`."""
        w = module._parameters.get("weight")
        return None if w is None else (w, None)


class Derived(Plain):
    """A subclass with a forward of its own, or whose weight is computed."""

    whole = in_graph = False

    def knows(self, module: nn.Module) -> bool:
        """Whether it is any other nn.Linear, but for ours."""
        return isinstance(module, nn.Linear) and not isinstance(module, Fp8Linear)


def weight_shape(module: nn.Linear) -> tuple[int, ...]:
    """What its weight's shape must be."""
    return module.out_features, module.in_features


def _weight(module: nn.Module) -> Tensor | None:
    plain = type(module).forward is nn.Linear.forward
    return weight_of(module) if plain else module._parameters.get("weight")
