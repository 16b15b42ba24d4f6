"""Linear layers that nobody converted: what FP8 would do to their tensors, were they converted by a recipe.

    recorded step     each layer's input, weight and grad_output go through the recipe's quantizers; what they become is
                      counted as for a converted layer, and thrown away
    other steps       no hook is there: nothing is paid

A compiled graph hears no hooks that come later. So a recorded step runs as if nothing had been compiled, and the next
one uses the graphs again as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.compute.kernels import choose
from narrowgauge.compute.nn.call import Call, without_autocast
from narrowgauge.compute.nn.clock import StepClock, inside_backward
from narrowgauge.compute.nn.eligible import DTYPES
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.nn.operands import OperandRole, quantize_operand
from narrowgauge.compute.recipes import by_name
from narrowgauge.session.selection import selects
from narrowgauge.session.sharded import Held, holders, is_distributed, local_of, used_of


class PlainSites:
    """The plain linear layers of a program's models.

    Args:
        recipe: the name of the one that they are judged by, which keeps no state; without one, none is looked at.
        eager: whether a recorded step runs uncompiled.
        training: whether a training forward is running, asked at each layer's call.
    """

    def __init__(self, recipe: str, *, eager: bool, training: Callable[[], bool]) -> None:
        self._recipe = by_name(recipe) if recipe else None
        self._eager, self._training = eager, training
        self._clock = StepClock()
        self._layers: list[tuple[nn.Module, LayerState]] = []
        self._weights: set[str] = set()  # seen in the open step
        self.copies: dict[str, int] = {}  # sites whose values other ranks hold as well, and the lowest that does
        self._open = ExitStack()
        self._passed_over: set[str] = set()

    def add(self, model: nn.Module, observer: Observer) -> int:
        """Take in the plain linear layers of a model; how many there are."""
        recipe = self._recipe
        if recipe is None:
            return 0
        found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, Fp8Linear)]
        for name, module in found:
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            backend, _ = choose(recipe, device)
            state = LayerState(name.replace("_orig_mod.", ""), recipe, backend, self._clock, observer=observer)
            self._layers.append((module, state))
        return len(found)

    @property
    def notes(self) -> list[str]:
        """What was not looked at; empty if everything was."""
        if not self._passed_over:
            return []
        kinds = ", ".join(sorted(self._passed_over))
        return [f"Some operands of linear layers are not recorded, because no quantizer takes them: {kinds}."]

    def begin(self) -> None:
        """A recorded step begins."""
        self.end()
        self._weights.clear()
        for module, state in self._layers:
            kept = module._parameters.get("weight")
            for handle in (
                module.register_forward_pre_hook(partial(self._begins, state, kept)),
                module.register_forward_hook(partial(self._called, state, kept)),
            ):
                self._open.callback(handle.remove)
        if self._eager and self._layers and "torch._dynamo" in sys.modules:  # a program that compiles has imported it
            self._open.enter_context(torch.compiler.set_stance("force_eager"))

    def end(self) -> None:
        """It ended: no hook is left."""
        self._open.close()

    def _begins(self, state: LayerState, kept: Tensor | None, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The layer is called. Its weight is looked at now: a sharded one is whole here, and perhaps not after."""
        weight = module._parameters.get("weight")
        if torch.compiler.is_compiling() or weight is None or inside_backward() or not self._training():
            return
        if state.name not in self._weights:
            self._weights.add(state.name)
            self._show(state, "weight", used_of(weight, kept))

    def _called(
        self, state: LayerState, kept: Tensor | None, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        if torch.compiler.is_compiling() or not (args and isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return
        held = local_of(args[0])
        if not inside_backward() and self._training():  # a recomputed forward was seen when it ran first
            self._show(state, "input", held)
            self._begins(state, kept, module, args)  # a model that is one layer is followed from its second call on
        if output.requires_grad:
            same = _copied_output(module._parameters.get("weight"), held, output)
            output.register_hook(lambda dy: self._show(state, "grad_output", local_of(dy), same))

    def _show(self, state: LayerState, role: OperandRole, held: Held, first: int | None = None) -> None:
        x = held.tensor
        if x is None or type(x) is not Tensor or x.dtype not in DTYPES or x.layout is not torch.strided:
            self._passed_over.add(f"{role} {_kind(x)}")
            return
        if not x.numel() or not selects(state.observer, state.name, role):
            return
        site = f"{getattr(state.observer, 'prefix', '')}{state.name}:{role}"
        first = held.first if held.first is not None else first
        if first is not None:
            self.copies[site] = first
        with torch.no_grad(), without_autocast(x.device.type):
            call = Call.begin(state, x.dtype, "write")
            if call.watched:
                quantize_operand(call, role, x.reshape(-1, x.shape[-1]), True, False)


def _kind(x: Tensor | None) -> str:
    if x is None:
        return "sum that is not yet summed over the ranks"
    kind = f"{type(x).__name__} of {x.dtype}"
    return (kind if x.layout is torch.strided else f"{kind}, {x.layout}").replace("torch.", "")


def _copied_output(weight: Tensor | None, x: Held, output: Tensor) -> int | None:
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
