"""What the model is given, of programs that set gradients to zero in mid-step, or have references.

It is looked at there. What becomes of it is said in `steps/zeroed.py` and `steps/references.py`, and is the same here;
what these few functions do not say is told by the long way, and ends the shortcut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.shortcut.now import Now
from narrowgauge.session.steps.steps import Steps

_NoFunctionModes = torch._C.DisableTorchFunction
_NONE: dict[str, Any] = {}


class Looks:
    """The looks at what one program gives its model.

    Args:
        now: the step that is made.
        hearing, steps: the session's.
        learns: whether what is called now is called with gradients, or will be when a checkpoint runs it again.
        none_left: whether gradients are left of nothing that is trained, or of what is set to zero with this alone.

    Attributes:
        model: the number by which the model is told apart.
    """

    def __init__(
        self,
        now: Now,
        hearing: Hearing,
        steps: Steps,
        learns: Callable[[], bool],
        none_left: Callable[[Optimizer | nn.Module], bool],
    ) -> None:
        self._now, self._hearing, self._batches, self._evals = now, hearing, steps.batches, steps.evals
        self._learns, self._none_left = learns, none_left
        self.model = 0

    @passed_over
    def trains(self, given: tuple[Any, ...]) -> bool:
        """The model is called with gradients and these; whether that is all."""
        now, batches = self._now, self._batches
        if now.within:  # a checkpoint runs it again
            return True
        if now.tries:
            now.met = now.waits = now.asks
            return True
        if not self._hearing.plainly() or self._hearing.stage:
            return False
        inputs = given if len(given) > 1 else (*given, _NONE)
        try:
            with _NoFunctionModes():
                counted = now.backwards > now.elsewhere
                if now.asks:
                    now.other = counted and (now.other or not batches.again(inputs))
                    if not now.met:
                        batches.begin_anew()
                    batches.met(inputs, self.model)
                    now.met = now.waits = True
                else:
                    again = batches.once_more(inputs)
                    now.other = counted and (now.other or not again)
        except Exception:  # which is told of by the long way
            return False
        if now.zeroed and now.other:
            now.throw()
        now.zeroed = False
        return True

    @passed_over
    def refers(self, module: nn.Module, given: tuple[Any, ...]) -> bool:
        """The model is called without gradients; whether as a reference, which is all."""
        now = self._now
        if not (now.waits and module.training and self._hearing.plainly()) or self._learns():
            return False
        try:
            with _NoFunctionModes():
                now.refers = self._batches.trains(given if len(given) > 1 else (*given, _NONE))
        except Exception:  # as above
            return False
        if now.refers:
            self._evals.reference_begins()
        return now.refers

    @passed_over
    def returned(self, given: tuple[Any, ...]) -> bool:
        """Its call ended, with what it was given and its output; whether that is all."""
        now, output = self._now, given[-1]
        if now.within:
            return True
        if not self._hearing.plainly():
            return False
        refers, now.refers = now.refers, False
        try:
            with _NoFunctionModes():
                if not refers:
                    self._batches.made(output, given[:-1] if now.tries else None)
                elif type(output) is not Tensor or output.numel() == 1:
                    self._evals.reference_ended(output)
        except Exception as error:
            self._hearing.kept("ended" if refers else "_made", error)
        return True

    @passed_over
    def zeroed(self, owner: Optimizer | nn.Module) -> bool:
        """Gradients of its parameters were set to zero behind a backward; whether that is all."""
        now = self._now
        if now.asks or not self._hearing.plainly():
            return False
        try:
            with _NoFunctionModes():
                now.zeroed = now.zeroed or (not now.evaluates and self._none_left(owner))
        except Exception:  # as above
            return False
        now.zeroes = True
        return True
