"""Whether another thread goes on with the training that is followed, which moves from thread to thread.

    asyncio.to_thread(train_step), a pool of several workers     step 1 in one thread, step 2 in another
    warm-up in the main thread, training in a worker

What it does has to be of what the followed thread has trained: a model that was called there, or parameters of the
optimizers that made its last step. And that thread has to be between steps. In its first step it has proven nothing
yet: a forward with gradients that led to no backward may have been a look at shapes, or an evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.trained import Trained, parameters

FAR = 1000  # operations before a loss, among which a parameter is looked for


class Called(Protocol):
    """A model that was called."""

    heard_in: int

    @property
    def module(self) -> nn.Module:
        """What is called."""
        ...


class SameTraining:
    """Compares what is done in other threads with what was done in the one that is followed.

    Args:
        hearing, steps: the session's.
        optimizers: those that the program made and still holds.
        called_in: the models that were called in a turn.

    All return None for what is no training at all.
    """

    def __init__(
        self, hearing: Hearing, steps: Steps, optimizers: Trained, called_in: Callable[[int], Iterable[nn.Module]]
    ) -> None:
        self._hearing, self._steps, self._optimizers, self._called_in = hearing, steps, optimizers, called_in

    def model(self, called: Called) -> bool:
        """A model that was taken is called with gradients."""
        return called.heard_in == self._hearing.turn or self.module(called.module)

    def module(self, module: nn.Module) -> bool:
        """A module that owns something trained is called with gradients."""
        return self._begins_all() or self._knows(module.parameters())

    def loss(self, loss: Any) -> bool:
        """`backward` is called on this, or it is about to be scaled for that."""
        if self._hearing.refused:  # which spares whoever trains something else the search
            return False
        return self._begins_all() or _made_of({id(p) for p in self._trained()}, loss)

    def optimizer(self, optimizer: Optimizer) -> bool:
        """It is about to step."""
        return self._begins_all() or self._knows(parameters(optimizer))

    def _begins_all(self) -> bool:
        return not self._steps.begun

    def _knows(self, found: Any) -> bool:
        trained = {id(p) for p in self._trained()}
        return any(id(p) in trained for p in found)

    def _trained(self) -> list[Tensor]:
        line = self._steps.line
        stepped = (line.optimizers if line is not None else None) or self._steps.stepped
        if not stepped:  # nothing has made a step yet: what it would train is what it called
            return [p for module in self._called_in(self._hearing.turn) for p in module.parameters()]
        return [p for optimizer in self._optimizers if id(optimizer) in stepped for p in parameters(optimizer)]


def _made_of(ids: set[int], loss: Any) -> bool:
    """Whether a loss, or one of several, was computed from any of the parameters with these ids."""
    losses = loss if isinstance(loss, tuple | list) else (loss,)
    waiting = deque(x.grad_fn for x in losses if isinstance(x, Tensor) and x.grad_fn is not None)
    seen = set(waiting)
    while waiting and len(seen) < FAR:
        node = waiting.popleft()
        if id(getattr(node, "variable", None)) in ids:
            return True
        before = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= before
        waiting.extend(before)
    return False
