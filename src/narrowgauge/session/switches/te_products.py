"""The hook that keeps operands of a layer's products out of FP8: TransformerEngine's quantizers, composed in its slots.

    before a call       the layer's scaling state is made, as the call would make it, and its slots are filled anew
    between calls       they stay: the backward, and whoever looks at the layer, find them

Slots, gemm g:   forward 3g input, 3g + 1 weight        backward 2g grad_output
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.session.sites.part import first_tensor
from narrowgauge.session.switches.te_hooks import PYTORCH, Hook, forget_weights, fp8_state
from narrowgauge.session.switches.te_operands import composed, own, set_dtype


class Products(Hook):
    """The layer's quantizers are composed anew: role -> what it is by rows and by columns."""

    def __init__(self, forms: Mapping[str, tuple[str, str]]) -> None:
        super().__init__()
        self._forms = {role: form for role, form in forms.items() if form != ("fp8", "fp8")}

    def end(self, module: nn.Module | None) -> None:
        """Leave the layer as it was."""
        super().end(module)
        if module is not None:
            _restore(module)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call begins."""
        state = fp8_state()
        if not state.is_fp8_enabled():
            if state.is_fp8_calibration():  # which asks quantizers of its own kinds
                _restore(module)
            return
        if module.fp8 and _recomputes():  # by the state of the forward that is run again
            return
        recipe = state.get_fp8_recipe()
        if (kept := getattr(recipe, "backward_override", None)) is not None:
            raise ValueError(f"the program's recipe has its backward in high precision already ({kept!r}).")
        dtype = _dtype(module, first_tensor(args, kwargs, "inp"))
        ready = module.fp8_initialized and module.fp8_meta.get("recipe") == recipe
        if not (ready and all(own(held[place]) is not held[place] for held, place, _ in self._slots(module))):
            _restore(module)
            module.init_fp8_metadata(num_gemms=_gemms(module))  # the call's own finds it done
            for held, place, role in self._slots(module):
                held[place] = composed(held[place], *self._forms[role], dtype)
            forget_weights(module)
        for held, place, _ in self._slots(module):
            set_dtype(held[place], dtype)
        self.reached = True

    def _slots(self, module: Any) -> Iterator[tuple[list[Any], int, str]]:
        for held, place, role in _slots(module):
            if role in self._forms:
                yield held, place, role


def _dtype(module: nn.Module, x: Tensor | None) -> torch.dtype:
    """As the layer is about to find it."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return next(module.parameters()).dtype if x is None else x.dtype


def _slots(module: Any) -> Iterator[tuple[list[Any], int, str]]:
    forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
    for gemm in range(_gemms(module)):
        for held, place, role in (
            (forward, 3 * gemm, "input"),
            (forward, 3 * gemm + 1, "weight"),
            (backward, 2 * gemm, "grad_output"),
        ):
            if place < len(held):
                yield held, place, role


def _restore(module: Any) -> None:
    for held, place, _ in _slots(module):
        if own(held[place]) is not held[place]:
            held[place] = own(held[place])
            forget_weights(module)


def _gemms(module: Any) -> int:
    return int(getattr(module, "num_gemms", 1))


def _recomputes() -> bool:
    return bool(import_module(f"{PYTORCH}.distributed").in_fp8_activation_recompute_phase())
