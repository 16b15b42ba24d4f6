"""Training steps that a program captures in a CUDA graph and replays.

    with torch.cuda.graph(g):               what is called in here runs once, to be recorded by CUDA: nothing of ours is
        loss = model(static_x).sum()        launched, asked or waited for. Where the loss and its norm will lie is noted
        loss.backward(); optimizer.step()
    g.replay()                              a step, if an optimizer stepped in the capture: its loss and norm are copied
                                            from where they lie, its learning rates read from the optimizer

A graph without an optimizer's step (a forward, a backward, what torch.compile captures) is a part of a step that Python
makes as always. What is replayed calls nobody: tensors of layers are not seen in it, which the run says. Those of
modules that `make_graphed_callables` made are: graphed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim.optimizer import Optimizer

from narrowgauge.session.doors.hearing import Hearing, heard, heard_if
from narrowgauge.session.steps.graphed import Graphed
from narrowgauge.session.steps.looking import learning_rates
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.updates import Updates


class Captured:
    """What a graph does when it is replayed."""

    def __init__(self) -> None:
        self.losses: list[Tensor | None] = []  # held: CUDA would use their room again within the graph
        self.norms: list[Tensor] = []
        self.optimizers: list[ref[Optimizer]] = []

    def trained(self) -> list[Optimizer]:
        """The optimizers that step in it."""
        return [optimizer for known in self.optimizers if (optimizer := known()) is not None]


class Graphs:
    """Follows the captures and replays of one program."""

    def __init__(self, steps: Steps, updates: Updates, hearing: Hearing, callables: Graphed) -> None:
        self._steps, self._updates, self.hearing, self.callables = steps, updates, hearing, callables
        self._open: Captured | None = None
        self._known: WeakKeyDictionary[Any, Captured] = WeakKeyDictionary()
        self._replayed = False

    @property
    def notes(self) -> list[str]:
        """What was not seen; empty if everything was."""
        if not self._replayed:
            return []
        return [
            "The program replays its steps as CUDA graphs: of these steps the loss, learning rates, time, the weights' "
            "norm and update and the norm of its own clipping are recorded, and no tensors of layers."
        ]

    def graphed(self, callables: Any, make: Callable[[], Any]) -> Any:
        """Modules or functions are graphed."""
        return self.callables.make(callables, make)

    @heard
    def capture_begins(self) -> None:
        """A capture is about to begin; the stream is not captured yet."""
        self._open = Captured()
        self._steps.capture_begins()

    def capture_ended(self, graph: Any) -> None:
        """It ended."""
        captured, self._open = self._open, None
        if captured is not None and captured.optimizers:
            with suppress(TypeError):  # a graph of a kind that cannot be told apart: its replays are not steps then
                self._known[graph] = captured

    def backward_captured(self, loss: Any) -> None:
        """`backward` was called in a capture."""
        loss = loss[0] if isinstance(loss, tuple | list) and len(loss) == 1 else loss
        if self._open is not None:
            self._open.losses.append(loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None)

    def clip_captured(self, norm: Any, order: float, of: frozenset[int] | None = None) -> None:
        """Gradients were clipped in a capture."""
        if self._open is not None and isinstance(norm, Tensor) and order == 2.0:
            self._open.norms.append(norm.detach())

    def step_captured(self, optimizer: Optimizer) -> None:
        """An optimizer stepped in a capture."""
        if self._open is not None:
            self._open.optimizers.append(ref(optimizer))

    def _same(self, graph: Any) -> bool | None:
        captured = self._known.get(graph)
        return None if captured is None else any(map(self._updates.same.optimizer, captured.trained()))

    @heard_if(lambda self, graph: self._same(graph))
    def replay_begins(self, graph: Any) -> None:
        """A graph is about to be launched."""
        captured = self._known.get(graph)
        if captured is None:
            return
        self._replayed = True
        self._steps.enter()
        line = self._steps.line
        if line is not None and line.movement is not None:
            for optimizer in captured.trained():
                line.movement.before(optimizer)

    @heard
    def replayed(self, graph: Any) -> None:
        """It was launched."""
        captured, line = self._known.get(graph), self._steps.line
        if captured is None or line is None:
            return
        for loss in captured.losses:
            self._updates.backwards += 1
            self._updates.losses.numbers += loss is not None
            self._steps.ledger.add_microbatch(loss)
        for norm in captured.norms:
            self._updates.gradients_clipped(norm, 2.0)
        for optimizer in captured.trained():
            learning_rates(line, optimizer)
            self._steps.ledger.took_part(optimizer)
            if line.movement is not None:
                line.movement.after(optimizer)
        self._updates.replayed()
