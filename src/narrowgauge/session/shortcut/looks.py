"""What the model is given, of programs that set gradients to zero in mid-step, or have references.

It is looked at there. What becomes of it is said in `steps/zeroed.py` and `steps/references.py`, and is the same here,
of what is torch's own tensors alone; anything else is told by the long way, and ends the shortcut.

A tensor's memory is one object for as long as it is there, which is held weakly here: to hold it as `Batches` does
takes four times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import NO_TASK, backward_task
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.models.alone import OfThread
from narrowgauge.session.shortcut.now import Now
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.tensors.given import Kept
from narrowgauge.session.tensors.storage import storage_of

MOST_MADE = 16  # tensors that the model returned, before they are handed to who knows of all
_NoFunctionModes, _function_modes = torch._C.DisableTorchFunction, torch._C._len_torch_function_stack
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_tracing = torch._C._is_tracing
_EMPTY = frozenset((type(None), bool, int, float, str))  # in these is no tensor


def _nobody() -> Optimizer | None:
    return None


def able() -> bool:
    """Whether a tensor's memory is one object for as long as it is there, as of the versions of torch that we know."""
    x = torch.empty(1)
    known = ref(x.untyped_storage())
    return known() is x.untyped_storage()


class Looks:
    """The looks at what one program gives its model.

    Args:
        now: the step that is made.
        hearing, steps: the session's.
        thread: what the calling thread is about.
        none_left: whether gradients are left of nothing that is trained, or of what is set to zero with this alone.
    """

    def __init__(
        self,
        now: Now,
        hearing: Hearing,
        steps: Steps,
        thread: OfThread,
        none_left: Callable[[Optimizer | nn.Module], bool],
    ) -> None:
        self._now, self._hearing, self._batches, self._evals = now, hearing, steps.batches, steps.evals
        self._thread, self._none_left, self._parted = thread, none_left, steps.rest.parted
        self._model = 0
        self._by: Callable[[], Optimizer | None] = _nobody
        self._given: list[Kept] = []  # of the step, or, where no references are asked for, by the last call
        self._last = 0  # from here on by the last
        self._made: list[ReferenceType[UntypedStorage]] = []

    def begin(self, model: int, by: Optimizer | None) -> None:
        """This model, by the number that tells it apart, is trained from here on; by this one alone, if it is one."""
        self._model, self._by = model, _nobody if by is None else ref(by)

    @passed_over
    def trains(self, inputs: tuple[Any, ...]) -> bool:
        """The model is called with gradients and these; whether that is all."""
        now, hearing, kept = self._now, self._hearing, self._given
        if now.within:  # a checkpoint runs it again
            return True
        if now.tries:
            now.met = now.waits = now.asks
            return True
        # As by `Hearing.plainly`, in no function more.
        if hearing.deaf or hearing.stage or _modes() or _function_modes() or _transforms() or _tracing():
            return False
        if len(inputs) != 2 or backward_task() != NO_TASK:
            return False
        args, kwargs = inputs
        given: list[Kept] = []
        again, asks, moving = False, now.asks, 0
        try:
            for x in (*args, *kwargs.values()) if kwargs else args:
                if type(x) is not Tensor:
                    if type(x) in _EMPTY:
                        continue
                    return False
                storage = x.untyped_storage()
                if asks:
                    moving += x.requires_grad
                    if x.is_nested or x.is_meta or self._batches.is_made(storage):
                        return False
                    for made in self._made:
                        if made() is storage:
                            return False
                for known in kept[self._last :]:
                    again = again or known[0]() is storage
                version = None if x.is_inference() else x._version
                given.append((ref(storage), int(x.storage_offset()), x.numel(), version))
        except (NotImplementedError, RuntimeError):  # without memory
            return False
        if not given or 0 < moving < len(given):  # of several those count that want no gradient
            return False
        now.other = now.backwards > now.elsewhere and (now.other or not again)
        if now.zeroed and now.other:
            now.throw()
        now.zeroed = False
        if now.met:
            self._last = len(kept)
            kept += given
        else:
            self._given, self._last = given, 0
        now.met, now.waits = True, asks
        return True

    @passed_over
    def refers(self, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
        """The model is called without gradients; whether as a reference, which is all."""
        now, hearing = self._now, self._hearing
        if not (now.waits and module.training) or self._thread.checkpoint or hearing.deaf or len(inputs) != 2:
            return False
        if _modes() or _function_modes() or _transforms() or _tracing() or backward_task() != NO_TASK:
            return False
        args, kwargs = inputs
        found = False
        try:
            for x in (*args, *kwargs.values()) if kwargs else args:
                if type(x) is not Tensor:
                    if type(x) in _EMPTY:
                        continue
                    return False
                storage, offset, numel = x.untyped_storage(), x.storage_offset(), x.numel()
                found, version = False, None if x.is_inference() else x._version
                for known, *of_it in self._given:
                    if known() is storage and of_it == [offset, numel, version]:
                        found = True
                        break
                if not found:
                    return False
        except (NotImplementedError, RuntimeError):  # without memory
            return False
        now.refers = found
        return found

    @passed_over
    def returned(self, given: tuple[Any, ...]) -> bool:
        """Its call ended, with what it was given and its output; whether that is all."""
        now, output = self._now, given[-1]
        if self._hearing.deaf or _modes() or _transforms() or _tracing():
            return False
        refers, now.refers = now.refers, False
        try:
            with _NoFunctionModes():
                if refers:
                    if type(output) is not Tensor or output.numel() == 1:  # or there is no loss
                        self._evals.reference_begins()  # since when no other was heard
                        self._evals.reference_ended(output)
                elif type(output) is Tensor and not now.tries:
                    if (storage := storage_of(output)) is not None:
                        self._keep(storage)
                else:
                    self._batches.made(output, given[:-1])
        except Exception as error:
            self._hearing.kept("ended" if refers else "_made", error)
        return True

    @passed_over
    def zeroed(self, owner: Optimizer | nn.Module) -> bool:
        """Gradients of its parameters were set to zero behind a backward; whether that is all."""
        now = self._now
        if now.parts and self._parted:  # of those that have stepped
            return True
        if not now.looks or now.asks or not self._hearing.plainly():
            return False
        try:
            with _NoFunctionModes():
                if not now.evaluates:  # of a sole optimizer all is set to zero with it
                    now.zeroed = now.zeroed or owner is self._by() or self._none_left(owner)
        except Exception:  # which is told of by the long way
            return False
        now.zeroes = True
        return True

    def tell(self) -> None:
        """Who looks by the long way knows what was given and made, too."""
        self._batches.made_in([storage for made in self._made if (storage := made()) is not None])
        if self._given:
            self._batches.recall(self._given, self._last, self._model)
        self._given, self._last, self._made = [], 0, []

    def _keep(self, storage: UntypedStorage) -> None:
        """What the model returned lies in this; what only passed through it stays data."""
        for known in self._given[self._last :]:
            if known[0]() is storage:
                return
        self._made.append(ref(storage))
        if len(self._made) > MOST_MADE:
            living = [made for made in self._made if made() is not None]
            if len(living) > MOST_MADE // 2:
                self._batches.made_in([there for made in living if (there := made()) is not None])
                living = []
            self._made = living
