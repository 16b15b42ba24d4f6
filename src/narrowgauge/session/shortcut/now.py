"""What is known of the step that is made: in one place, where all functions of the shortcut look and keep it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.optimizer_steps import Ended
from narrowgauge.session.steps.ledger import float32, together
from narrowgauge.session.steps.line import Line, Rates
from narrowgauge.session.steps.looking import named_rates
from narrowgauge.session.steps.rest import Rest

Leave = Callable[..., None]  # has the ordinary functions back in their places, who then know what is known so far


class Now:
    """That of one program.

    Attributes:
        taken: the shortcut is: its functions are in their places.
        made: so many steps, since it was.
        until: the step that ends it.
        on_host: losses are there, as those so far.
        trainers: who makes all of these steps; None where they have no lines, and no loss is kept.
        others: what is told as well that a step has ended.
        beside: other models are trained beside; `theirs`: a backward of theirs runs.
        passed: optimizers' steps that are none of those made, since the shortcut is: theirs, and parts of its own.

        begins: torch's hook for all modules was told of a call of the model, and the model's own was not yet.
        inside: the model's call runs.
        called: it was called in this step.
        within: a backward runs.
        backwards: calls of it in this step.
        vectors: of these, those on no number; `most_vectors` as a step has.
        loss: the sum of what the others were called on.
        stepping: the optimizer's step has begun.
        evaluates, evaluated: its closure's first call runs; or has returned.
        tries: a later one runs, and what is called is none of the step's.
        rates: those that it steps with.
        parts: several optimizers make each step, one after the other; `by`: the one that steps, or stepped last.
        rated: the rates of those that have begun to, by their groups' ids.

    And where what the model is given is looked at (`looks.py`):

    Attributes:
        looks: it is; `asks` as well whether what is called without gradients is a reference.
        clears: told of gradients that are set to zero behind a backward; returns whether that is all.
        met: the model was called with gradients in this step, and has been looked at.
        waits: and backward was not called since.
        asked: torch's hook for all modules was told of a call without gradients, and the model's own was not yet.
        refers: such a call runs, and is a reference's.
        zeroed, other: as the step's line has it (`other_data`).
        elsewhere: calls of backward whose gradients were thrown away in this step; `thrown`, since the shortcut is.
        zeroes: gradients were set to zero behind a backward since then.
    """

    __slots__ = (
        *("backwards", "begins", "called", "evaluated", "evaluates", "inside", "loss", "made", "most_vectors"),
        *("on_host", "others", "rates", "stepping", "taken", "trainers", "tries", "until", "vectors", "within"),
        *("asked", "asks", "clears", "elsewhere", "looks", "met", "other", "refers", "thrown", "waits", "zeroed"),
        *("beside", "by", "parts", "passed", "rated", "theirs", "zeroes"),
    )

    def __init__(self) -> None:
        self.taken, self.made, self.until, self.on_host, self.most_vectors = False, 0, 0.0, False, 0
        self.trainers: set[int] | None = None
        self.others: list[Ended] = []
        self.rates: Rates
        self.loss: Tensor | float | None
        self.looks = self.asks = self.beside = self.theirs = self.parts = False
        self.by: ReferenceType[Optimizer] | None = None
        self.rated: dict[int, float | Tensor] = {}
        self.passed = 0
        self.clears: Callable[[Optimizer | nn.Module], bool] = lambda owner: False
        self.forget()

    def begin(self, rest: Rest, line: Line | None, others: list[Ended]) -> None:
        """The shortcut is taken in these steps, of which this line was the last one's."""
        self.trainers = None if rest.line is None else rest.line.trainers
        self.on_host = line is None or isinstance(line.loss, float)
        self.others, self.made, self.passed, self.most_vectors = others, 0, 0, rest.vectors
        self.parts = len(rest.team) > 1
        self.until = inf if rest.until is None else rest.until
        self.taken = True

    def forget(self) -> None:
        """Nothing is known of the next one."""
        self.called = self.within = self.stepping = self.inside = self.begins = False
        self.evaluates = self.evaluated = self.tries = False
        self.met = self.waits = self.asked = self.refers = self.zeroed = self.other = self.zeroes = False
        self.backwards, self.vectors, self.loss, self.rates = 0, 0, None, {}
        self.elsewhere = self.thrown = 0
        self.rated.clear()

    def put_into(self, line: Line, step: int) -> None:
        """What is known so far is in the step's line."""
        loss = float32(self.loss) if isinstance(self.loss, float) else self.loss  # as all losses are told
        line.step, line.loss, line.backwards, line.vectors = step, loss, self.backwards, self.vectors
        line.elsewhere, line.zeroed, line.other_data = self.elsewhere, self.zeroed, self.other
        line.scalars.update({"lr": self.rates} if isinstance(self.rates, float) else self.rates)
        if self.rated:
            line.rates.update(self.rated)
            line.scalars.update(named_rates([*self.rated.values()]))

    def all_rates(self) -> Rates:
        """Those that all parts of the step were made with."""
        if len(different := {*self.rated.values()}) == 1:
            (rate,) = different
            if type(rate) is float and rate == rate:  # one that is no number is named, as ever
                return rate
        return named_rates([*self.rated.values()])

    def throw(self) -> None:
        """What the step has so far is thrown away."""
        self.thrown += self.backwards - self.elsewhere
        self.elsewhere, self.vectors, self.loss = self.backwards, 0, None

    @passed_over
    def keeps(self, loss: Tensor) -> bool:
        """Whether what backward is called on is one number, which is kept, or one of the vectors that a step has."""
        if self.trainers is None:
            return True
        if self.most_vectors and loss.numel() != 1:
            expected = self.vectors < self.most_vectors
            self.vectors += expected
            return expected
        number: Tensor | float
        if self.on_host:  # by one of torch's functions: each lies in another page of its memory
            try:
                number = loss.item()
            except RuntimeError:
                return False
            if isinstance(self.loss, float):
                number = together(float32(self.loss), float32(number))
        elif loss.is_cuda and loss.dtype is torch.float32 and not loss.dim():
            number = loss.detach().clone() if self.loss is None else together(self.loss, loss.detach())
        else:
            return False
        self.loss = number
        return True
