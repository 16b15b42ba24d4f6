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
from itertools import chain
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.compute.nn.parallel.placements import some_are_distributed
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.quant import ROWWISE, PerTensor
from narrowgauge.compute.quant.dtypes import format_of
from narrowgauge.session.doors.hearing import unreal
from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.sites.part import ByHeld, Rule, operand
from narrowgauge.session.tensors.sharded import Held, here, is_distributed, local_of, used_of
from narrowgauge.session.tensors.storage import address_of

PLACE = "torchao.float8.float8_training_tensor"
LATEST = 4  # inputs and gradients that are held after their casts: one input may be that of several layers
WEIGHTS = 16  # the same of weights, which are there anyway
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


class Awaited(NamedTuple):
    """What will be cast, and who is told then. It is not held: once it is gone, its memory is another's."""

    tensor: ReferenceType[Tensor]
    then: ByHeld


class Casts:
    """Those of a recorded step, while it is open."""

    def __init__(self) -> None:
        self._latest: deque[Cast] = deque(maxlen=LATEST)
        self._weights: deque[Cast] = deque(maxlen=WEIGHTS)
        self._waiting: list[Awaited] = []
        self._open = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Meanwhile all that torchao makes are heard, if the program has loaded it and may spread tensors over ranks.

        Each cast of a layer would else go through a function of ours, to be told that there is nothing to be heard.
        """
        function: Any = getattr(sys.modules.get(PLACE) if some_are_distributed() else None, "_ToFloat8ConstrFunc", None)
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
            self._weights.clear()
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                _unheard(each.then)

    @torch.no_grad()
    def show(self, x: Tensor, kept: Tensor | None, then: ByHeld) -> bool:
        """Have `then` called with what this rank has of x, and how it was cast; later, if it is yet to be.

        False if nothing of x is spread over ranks.
        """
        if not (is_distributed(x) or _is_fp8(x)):
            return False
        mine = here(x)
        if not _is_fp8(mine):
            self._by_memory(x, kept, then)
        elif kept is not None and not _is_fp8(here(kept)):  # a weight, whose shard FSDP2 had cast to gather it
            then(local_of(kept), Cast(kept, mine._scale, mine._data.dtype).own)  # type: ignore[attr-defined]
        else:
            scale = mine._scale  # type: ignore[attr-defined]
            made = next((cast for cast in self._casts() if cast.scale is scale), None)
            if made is None:  # told as a tensor that no quantizer takes
                then(local_of(x), None)
            else:
                then(local_of(made.source), made.own)
        return True

    def _casts(self) -> Iterator[Cast]:
        return chain(reversed(self._latest), reversed(self._weights))

    def _by_memory(self, x: Tensor, kept: Tensor | None, then: ByHeld) -> None:
        place = _place(x)
        made = next((cast for cast in self._casts() if place and _place(cast.source) == place), None)
        if made is not None:
            then(used_of(x, kept), made.own)
        elif self._open and place and _lies_in_rows(here(x)):
            self._waiting.append(Awaited(ref(x), then))
        else:  # torchao will cast a copy of it, or nobody listens
            _unheard(then)

    def _beside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @unseen
        def forward(ctx: Any, tensor: Any, scale: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
            made = original(ctx, tensor, scale, dtype, *rest, **named)
            if self._open and is_distributed(tensor) and not unreal():
                with suppress(Exception):  # of what was not heard the notes say that no quantizer takes it
                    role = getattr(named.get("gemm_input_role", rest[1] if len(rest) > 1 else None), "value", "")
                    unseen_by_modes(self._cast, tensor, made, dtype, role)
            return made

        return forward

    @torch.no_grad()
    def _cast(self, source: Tensor, made: Tensor, dtype: torch.dtype, role: str) -> None:
        scale = here(made)._scale  # type: ignore[attr-defined]
        cast = Cast(source.detach(), scale, dtype, "" if scale.numel() == 1 else BY_ROWS)
        place, waiting = _place(source), self._waiting
        self._waiting = []
        found = False
        for each in waiting:
            x = each.tensor()
            if x is not None and (not place or _place(x) != place):
                self._waiting.append(each)
                continue
            if x is None:
                _unheard(each.then)
                continue
            found = True
            try:
                each.then(local_of(x), cast.own)
            except Exception:  # of this one: the others wait on
                _unheard(each.then)
        if not found:
            (self._weights if role == "weight" else self._latest).append(cast)


OVER_RANKS = Casts()


def _unheard(then: ByHeld) -> None:
    """Nothing is there to be shown: a note is left."""
    then(Held(torch.zeros(1, 1)), lambda role, x: UNHEARD)


def _place(x: Tensor) -> tuple[int, int] | None:
    """Address and size of what is here of x; None if it has no memory."""
    mine = local_of(x).tensor
    address = 0 if mine is None else address_of(mine)
    return None if mine is None or not address else (address, mine.numel())


def _lies_in_rows(x: Tensor) -> bool:
    """Whether torchao can turn it into rows without copying it."""
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:
        return False
    return True


def _is_fp8(x: Tensor) -> bool:
    """Whether it is one of torchao's tensors in FP8, which have `_data` and a `_scale`."""
    return type(x).__name__ == "Float8TrainingTensor"


def _given(dtype: torch.dtype, scale: Tensor) -> Rule:
    inv_scale = scale.detach().reshape(()).float()
    return Rule(operand(format_of(dtype), PerTensor(), ROWWISE), Given(None, inv_scale))
