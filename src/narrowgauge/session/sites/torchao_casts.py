"""What torchao's casts made of tensors that are spread over ranks: their scales come from all parts, and are its own.

    it casts a DTensor       each rank has the codes of its part, by one scale for all        heard as it casts
    a layer is given x       already cast, perhaps gathered in FP8                            known again by its scale
                             yet to be cast                                                   known again by its memory
    FSDP2 gathers a weight   cast between its uses, by the shard                              has its scale with it

The tensor behind a cast is shown as the part that this rank cast, the shard of a weight that FSDP2 gathers: merged over
the ranks it is the whole. Source: torchao.float8, float8_training_tensor.py, fsdp_utils.py, float8_tensor_parallel.py.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.quant import ROWWISE, PerTensor
from narrowgauge.compute.quant.dtypes import format_of
from narrowgauge.session.doors.hearing import unreal
from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.sites.part import ByHeld, Rule, operand
from narrowgauge.session.tensors.sharded import Held, here, is_distributed, local_of
from narrowgauge.session.tensors.storage import address_of

PLACE = "torchao.float8.float8_training_tensor"
LATEST = 16  # casts that are remembered, with what was cast: one input may be that of several layers
UNHEARD = "Some tensors of torchao's layers, spread over ranks, were not seen as they were cast; not recorded."
BY_ROWS = "torchao scales a tensor that is spread over ranks by its rows: only those with one scale are recorded."


class Cast(NamedTuple):
    """One: the tensor, the FP8 tensor's `_scale`, and how that was made; `why` not if that cannot be shown."""

    source: Tensor
    scale: Tensor
    dtype: torch.dtype
    why: str = ""

    def own(self, role: OperandRole, x_MK: Tensor) -> Rule | str:
        """The rule that made these codes; torchao's scale multiplies towards FP8."""
        return self.why or _given(self.dtype, self.scale)


class Casts:
    """Those of a recorded step, while it is open."""

    def __init__(self) -> None:
        self._latest: deque[Cast] = deque(maxlen=LATEST)
        self._waiting: dict[tuple[int, int], ByHeld] = {}  # by the address and size of what will be cast
        self._open = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Meanwhile all that torchao makes are heard, if the program has loaded it."""
        function: Any = getattr(sys.modules.get(PLACE), "_ToFloat8ConstrFunc", None)
        before = None if function is None or self._open else vars(function).get("forward")
        if not isinstance(before, staticmethod):
            yield
            return
        ours = function.forward = staticmethod(self._beside(before.__func__))
        self._open = True
        try:
            yield
        finally:
            self._open = False
            if vars(function).get("forward") is ours:  # else it is the program's now, and calls ours
                function.forward = before
            self._latest.clear()
            waiting, self._waiting = self._waiting, {}
            for then in waiting.values():  # nothing is held of them: a note is left
                then(Held(torch.zeros(1, 1)), lambda role, x: UNHEARD)

    @torch.no_grad()
    def show(self, x: Tensor, kept: Tensor | None, then: ByHeld) -> bool:
        """Have `then` called with what this rank has of x, and how it was cast; later, if it is yet to be.

        False if nothing of x is spread over ranks.
        """
        if not (is_distributed(x) or _is_fp8(x)):
            return False
        mine = here(x)
        if not _is_fp8(mine):
            self._by_memory(x, _place(mine), then)
        elif kept is not None and not _is_fp8(here(kept)):  # a weight, whose shard FSDP2 had cast to gather it
            then(local_of(kept), Cast(kept, mine._scale, mine._data.dtype).own)  # type: ignore[attr-defined]
        else:
            scale = mine._scale  # type: ignore[attr-defined]
            made = next((cast for cast in reversed(self._latest) if cast.scale is scale), None)
            if made is None:  # told as a tensor that no quantizer takes
                then(local_of(x), None)
            else:
                then(local_of(made.source), made.own)
        return True

    def _by_memory(self, x: Tensor, place: tuple[int, int], then: ByHeld) -> None:
        for cast in reversed(self._latest):
            if _place(here(cast.source)) == place:
                then(local_of(x), cast.own)
                return
        self._waiting[place] = then

    def _beside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @unseen
        def forward(ctx: Any, tensor: Any, scale: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
            made = original(ctx, tensor, scale, dtype, *rest, **named)
            if self._open and is_distributed(tensor) and not unreal():
                with suppress(Exception):  # of what was not heard the notes say that no quantizer takes it
                    unseen_by_modes(self._cast, tensor, made, dtype)
            return made

        return forward

    @torch.no_grad()
    def _cast(self, source: Tensor, made: Tensor, dtype: torch.dtype) -> None:
        scale = here(made)._scale  # type: ignore[attr-defined]
        cast = Cast(source, scale, dtype, "" if scale.numel() == 1 else BY_ROWS)
        self._latest.append(cast)
        then = self._waiting.pop(_place(here(source)), None)
        if then is not None:
            then(local_of(source), cast.own)


OVER_RANKS = Casts()


def _place(x: Tensor) -> tuple[int, int]:
    return address_of(x), x.numel()


def _is_fp8(x: Tensor) -> bool:
    """Whether it is one of torchao's tensors in FP8, which have `_data` and a `_scale`."""
    return type(x).__name__ == "Float8TrainingTensor"


def _given(dtype: torch.dtype, scale: Tensor) -> Rule:
    inv_scale = scale.detach().reshape(()).float()
    return Rule(operand(format_of(dtype), PerTensor(), ROWWISE), Given(None, inv_scale))
