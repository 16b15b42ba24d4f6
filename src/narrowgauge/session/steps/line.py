"""What is known of one step: filled while it is open, and made into numbers when its row is."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.session.steps.clips import Clips
from narrowgauge.session.tensors.fingerprint import Chained, stored
from narrowgauge.session.tensors.movement import Movement
from narrowgauge.session.tensors.norms import Squares

Event = torch._C._CudaEventBase
Events = tuple[Event, Event] | None
Rates = float | dict[str, float | Tensor]  # one of all parameter groups; or each by its name


@dataclass
class Line:
    """The step being written, and then what its row is made of."""

    step: int
    loss: Tensor | float | None = None
    microbatches: int = 0
    backwards: int = 0  # calls of backward, which microbatches are not where some were thrown away or tried
    vectors: int = 0  # such calls on no number, which have no loss, but of those elsewhere
    elsewhere: int = 0  # such calls whose gradients were thrown away, or only tried by an optimizer
    tried: int = 0  # of these, those that an optimizer only tried, with its closure
    zeroes: bool = False  # gradients were set to zero behind one of them, and before the step
    zeroed: bool = False  # all that its microbatches left; since then nothing was called
    other_data: bool = False  # since the last backward a model was called, with other data than for that one, or failed
    tokens: int = 0
    scalars: dict[str, float | Tensor] = field(default_factory=dict)
    recorded: bool = False  # tensors are looked at in this step
    brief: bool = False  # nobody looked at it: its loss, rates and time are all that is kept
    disturbed: bool = False  # an evaluation or a probe fell into its time
    before: tuple[Tensor | float | None, int] = (None, 0)  # loss and microbatches before the last one was added
    learned: int = 0  # tokens of those whose backward pass went through
    rates: dict[int, float | Tensor] = field(default_factory=dict)  # learning rates, by the parameter groups' ids
    clips: Clips = field(default_factory=Clips)  # norms that are the program's own
    # Of the optimizers that stepped so far, as far as nobody had clipped them: by the ids of the parameters.
    unclipped: list[tuple[frozenset[int], Squares]] = field(default_factory=list)
    summands: int = 0  # gradients that no rank has the sum of
    sparse: int = 0  # gradients of which no norm is taken
    unheard: bool = False  # there are more, whose norm nobody took
    norm: Tensor | float | None = None  # of all gradients, by an engine that says so
    movement: Movement | None = None
    stepping: set[int] = field(default_factory=set)  # the ids of optimizers that were looked at and have not stepped
    stepped: set[tuple[int, ...]] = field(default_factory=set)  # the optimizers that stepped, with what they held
    optimizers: set[int] = field(default_factory=set)  # their ids
    trainers: set[int] = field(default_factory=set)  # their numbers
    digest: Chained | None = None  # of all that models were called with so far
    events: Events = None  # on a device, around the step

    def look_again(self, optimizer: int) -> None:
        """Forget what was seen of an optimizer's step that has raised; of the others', too, if none has stepped."""
        if not self.stepped:
            self.clips, self.unclipped = Clips(), []
            self.rates.clear()
            for name in [name for name in self.scalars if name.startswith("lr")]:
                del self.scalars[name]
            if self.movement is not None:
                self.movement.begin_anew()
        self.stepping.discard(optimizer)

    @property
    def on_host(self) -> bool:
        """Whether none of its numbers has to come from a device."""
        for value in (*self.scalars.values(), self.loss, self.digest):
            if isinstance(value, Tensor) and not value.is_cpu:
                return False
        return self.events is None

    def numbers(self, turn: int | None) -> dict[str, float | Tensor]:
        """All of the step's row that it knows itself; `turn` is the number of the optimizers that made it."""
        numbers = dict(self.scalars)
        if self.digest is not None:
            numbers["data_digest"] = stored(self.digest)
        if self.loss is not None:
            numbers["loss"] = self.loss
        if not self.brief:
            numbers["microbatches"] = self.microbatches
        if self.tokens:  # or none were found, which is no number of tokens
            numbers["tokens"] = self.tokens
        if turn is not None:
            numbers["turn"] = turn
        numbers["clean"] = float(not (self.disturbed or self.recorded))
        return numbers


# What is kept of a step that was made as the ones before (`shortcut/`): who made it, its number, loss, rates, seconds
# and events.
Short = tuple[set[int], int, Tensor | float | None, Rates, float, Events]
UNCLIPPED = Clips()  # of all brief lines, of which none hears of any


def line_of(short: Short) -> Line:
    """The line of such a step."""
    trainers, step, loss, rates, seconds, events = short
    if isinstance(loss, float):
        loss = c_float(loss).value  # in float32, as all losses are told
    scalars: dict[str, float | Tensor] = {"lr": rates} if isinstance(rates, float) else rates
    scalars["step_seconds"] = seconds
    return Line(step, loss, scalars=scalars, brief=True, trainers=trainers, clips=UNCLIPPED, events=events)
