"""Finds evaluation losses: scalar losses that a program computes without gradients.

Two places, the outer one winning: what a model's call returns (a scalar, or an object, dict or named tuple with a
scalar `loss`), and what torch's own loss functions return. All losses between two optimizer steps are one evaluation,
of the weights that the first of the two made; its value is their mean.

A loss is of the models that were called since the loss before. One of other models alone (an averaged copy of the
weights, say) counts only where the evaluation has no others. One of a batch that trains (a metric beside the loss) is
none of an evaluation.

A call that returns one number beside other things (`logits, loss`) may mean a part of the loss by it, or a temperature:
if torch's loss function is called on what came of it, that is the loss; and where none was called inside, nor the
program trains by that number alone, there is none. Once it is known to, what torch's then returns is a metric. One
number that has a dimension ([1], [1, 1]), or that calls which train return none of, may be what is predicted for one
row, and what torch's then returns is its loss.

Of several losses of the very same tensors, by several functions, one counts (`measured`).

What a program makes of a loss afterwards nobody knows. One that torch was asked to sum over the batch is told as a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from narrowgauge.errors import let_pass
from narrowgauge.session.doors.loss_functions import follow
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.steps.aside import Aside
from narrowgauge.session.steps.loss_counts import LossCounts
from narrowgauge.session.steps.measured import Measure, Measured
from narrowgauge.session.steps.passes import Passes
from narrowgauge.session.steps.returned import ReturnedLosses
from narrowgauge.session.steps.trains_by import TrainsBy
from narrowgauge.session.steps.unheard import Unheard
from narrowgauge.session.tensors.sharded import here

MOST_KNOWN = 1 << 14  # modules


def scalar_loss(output: Any) -> Tensor | None:
    """The scalar loss that a model's output is or carries, if any."""
    if isinstance(output, dict):
        output = output.get("loss")
    elif _nameless(output):
        scalars = [x for x in output if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
        output = scalars[0] if len(scalars) == 1 else None
    elif not isinstance(output, Tensor):
        output = _held(output, "loss")
    if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point():
        return output
    return None


def _nameless(output: Any) -> bool:
    """Whether a number in it may mean anything: a tuple or list, but no named one with a `loss`."""
    return isinstance(output, tuple | list) and "loss" not in getattr(type(output), "_fields", ())


def _held(output: Any, name: str) -> Any:
    """What an object of the program's has there; it may refuse with any error (`__getattr__ = dict.__getitem__`)."""
    try:
        return getattr(output, name, None)
    except Exception as error:
        let_pass(error)
        return None


def _is_row(output: Any, own: ReturnedLosses) -> bool:
    """Whether it may be what a model predicts for one row."""
    return isinstance(output, Tensor) and (output.dim() > 0 or (own.apart and not own.otherwise))


class _Loss(NamedTuple):
    steps: int  # made before it
    measures: tuple[Measure, ...]  # all of the same, of which one counts
    ours: bool
    further: bool  # of what the loss before it was computed of
    returned: ReturnedLosses | None  # by a model's call, among these of the model
    unsure: bool = False  # whether it is a loss
    beside: bool = False  # other things


def _number(loss: Tensor) -> Tensor:
    return here(loss).detach().reshape(()).clone().float()


class EvalLosses:
    """Collects losses; `take()` gives the mean of each evaluation. `steps` says how many steps were made by now.

    Attributes:
        fed: a model was called with gradients since the step.
        unsure: called where a loss may be an evaluation's, or a reference's of the batch that trains; whether it is
            left out, given whether there are others to be taken.
        idle: since the step nothing else was heard, nor is anything of before left: such a call changes `fed` alone,
            and so does a step.
        disturbed: called where that is over.
    """

    def __init__(self, steps: Callable[[], int] = lambda: 0, aside: Aside | None = None) -> None:
        self._steps, self._away = steps, aside or Aside()
        self._losses: list[_Loss] = []
        self._mark: int | None = None
        self._called_since: set[bool] = set()  # the last loss: models that train (True), and others
        self._last_was_ours = self._ours = True  # `_ours`: the model that was called last
        # Whether modules hold parameters that are trained, by their ids; None of those that have no parameters.
        self._holds: dict[int, tuple[ref[nn.Module], bool | None]] = {}
        self._trained: frozenset[int] = frozenset()
        self._passes = Passes()
        self._counts = LossCounts()
        self._told = False  # the last loss is what the last call returned
        self._beside = self._row = False  # beside other things; with a dimension
        self._after_call = False  # there was a loss since the model's call that was heard last
        self._left = False  # the last call's is such a one
        self.trains_by = TrainsBy()
        self._unheard = Unheard()
        self._measured = Measured()
        self._own = ReturnedLosses()  # of the model whose call without gradients was heard last
        self._trains = False  # the model's call that was heard last had gradients
        self.fed, self.idle = False, False
        self.disturbed: Callable[[], None] = lambda: None
        self._shorten: Callable[[Collection[str]], None] = lambda names: None
        self.unsure: Callable[[bool], bool] = lambda others: False
        self._unsure = False
        self._metrics = 0  # as a reference's call began
        self._before = 0, 0  # several and unreduced ones, as the model's call began: what is inside is a part

    def watch(self, seams: Seams, mine: Callable[[], bool] = lambda: True) -> None:
        """Listen to torch's loss functions, where the calling thread is `mine`."""
        self._shorten = follow(seams, self._heard, mine, self._measured.trained.add)

    def shorten(self) -> None:
        """Where the seams are swapped for a while: those that the program trains by are called by one function."""
        self._shorten(self._measured.trained)

    def _judges(self) -> None:
        if self.idle:
            self.disturbed()
            self.idle = False

    def _heard(self, function: str, loss: Tensor, arguments: Sequence[Any], summed: bool) -> None:
        """torch's loss function returned this without gradients."""
        self._judges()
        self._unheard.loss()
        if self._trains or any(isinstance(x, Tensor) and x.grad_fn is not None for x in arguments):
            self._counts.metrics += 1
        elif loss.numel() == 1:
            if self._told and self._own.whole and not self._row and not self._called_since:
                self._counts.further += 1
                return
            self._counts.rows -= self._left  # it was made of that
            self._left = False
            replaces = self._row or (self._beside and not self._own.whole)
            if replaces and self._losses and False not in self._called_since:
                self._counts.several -= self._losses.pop().further
                self._called_since.add(True)  # as if nothing had been made of the call yet
                self._after_call = False
            self._add_measure(function, loss, arguments, summed)
        else:
            self._counts.unreduced += 1

    def _add_measure(self, function: str, loss: Tensor, arguments: Sequence[Any], summed: bool) -> None:
        if self._losses and not self._called_since and self._measured.again(function, arguments):
            latest = self._losses[-1]
            measures = *latest.measures, Measure(function, _number(loss), summed)
            self._losses[-1] = latest._replace(measures=measures)
            self._counts.beside_another += 1
        else:
            self._add(loss, summed, function=function)
            self._measured.counts(function, arguments)

    def _add(
        self,
        loss: Tensor,
        summed: bool = False,
        *,
        function: str = "",
        returned: ReturnedLosses | None = None,
        unsure: bool = False,
        beside: bool = False,
    ) -> None:
        if self._unsure and self.unsure(bool(self._losses)):
            return
        self._told = self._beside = self._row = False
        self._measured.forget()
        further = not self._called_since and self._after_call
        self._counts.several += further
        self._after_call |= bool(self._called_since)
        if self._called_since:
            self._last_was_ours = True in self._called_since
            self._called_since.clear()
        self._away.judged(ours=self._last_was_ours)
        if self._last_was_ours:
            self._passes.loss(begins=bool(self._losses) and self._losses[-1].steps != self._steps())
        measure = Measure(function, _number(loss), summed)
        self._losses.append(_Loss(self._steps(), (measure,), self._last_was_ours, further, returned, unsure, beside))

    def training_begins(self, *, taught: int = 0) -> None:
        """A model's call with gradients begins: until one without is heard, losses without are of what it returns.

        So many calls without, in evaluation mode, were its teacher's.
        """
        self._called_since.clear()
        self._unheard.over(taught=taught)
        self._after_call = False
        self._trains = self.fed = True
        self._unsure = False

    def model_begins(self, model: Any, *, evaluates: bool = False, unsure: bool = False, trains: bool = True) -> None:
        """A model's call without gradients begins; losses inside it are parts of what it may return.

        It `evaluates` if the model is in that mode, and is `unsure` if what it is given may be what trains. One that
        `trains` no more is another.
        """
        self._judges()
        self._unsure = unsure
        if evaluates and not self.fed:  # or it is a reference's, beside a batch that trains
            self._unheard.called()
        self._own = self.trains_by.of(model)
        self._mark = len(self._losses)
        self._told = self._beside = self._row = self._left = False
        self._before = self._counts.several, self._counts.unreduced
        self._called_since.add(trains)
        self._ours = trains
        self._trains = False

    def knows(self, module: nn.Module) -> bool:
        """Whether `module_called` would learn nothing of it."""
        if True in self._called_since:
            return True
        known = self._holds.get(id(module))
        return known is not None and known[0]() is module and (known[1] is None or known[1] in self._called_since)

    def module_called(self, module: nn.Module, trained: Callable[[], Collection[int]], inputs: Any = ()) -> None:
        """Another module is called without gradients; `trained` gives the ids of all parameters that are."""
        self._judges()
        known = self._holds.get(id(module))
        if known is None or known[0]() is not module:
            self._trained = self._trained or frozenset(trained())
            own = [id(p) in self._trained for p in module.parameters()]
            if len(self._holds) >= MOST_KNOWN:
                self._holds.clear()
            known = self._holds[id(module)] = ref(module), any(own) if own else None
        if known[1] is not None:
            if not known[1] and False not in self._called_since:
                self._away.another_called(inputs)
            self._called_since.add(known[1])
            if known[1] or not self.fed:  # or a teacher, between a batch's forward and its step
                self._trains = False

    def stepped(self) -> None:
        """An optimizer stepped: what was called before belongs to no evaluation that follows."""
        self._called_since.clear()
        self._unheard.over()
        self._last_was_ours, self.fed = True, False
        self._unsure = False
        self._told = self._beside = self._row = self._left = False
        self.idle = self._trains and not self._losses

    def training_changed(self) -> None:
        """Other parameters are trained now."""
        self._holds.clear()
        self._trained = frozenset()
        self.trains_by.training_changed()

    def data_came(self, data: int = 0, iterator: int = 0, *, first: bool = False) -> None:
        """A data loader's iterator gave a batch of this data, its `first` or another."""
        self._unheard.data()
        self._passes.came(data, iterator, first=first)

    def data_ended(self, iterator: int = 0) -> None:
        """It came to its end."""
        self._unheard.data()
        self._passes.ended(iterator)

    def model_ended(self, output: Any) -> None:
        """The call ended with `output`."""
        loss = scalar_loss(output)
        if loss is not None and self._mark is not None and not loss.is_meta:
            beside, row = _nameless(output), _is_row(output, self._own)
            unsure = (beside or row) and self._mark == len(self._losses)
            left = unsure and self._own.apart
            if beside or not left:  # a prediction's loss may be computed by hand
                self._unheard.loss()
            if left:
                self._count_out(beside)
                self._left, self._mark = not beside, None
                return
            del self._losses[self._mark :]
            self._counts.several, self._counts.unreduced = self._before
            self._called_since.add(self._ours)
            self._add(loss, returned=self._own, unsure=unsure, beside=beside)
            self._told, self._beside, self._row = True, beside, row and unsure
        self._mark = None

    @property
    def backward_waits(self) -> bool:
        """Whether a model was called with gradients since the step, and backward not since."""
        return self.fed and self.trains_by.waits

    def reference_begins(self) -> None:
        """A model's call without gradients begins, on a batch that trains: it is none of an evaluation."""
        self._metrics = self._counts.metrics

    def take_back(self) -> None:
        """The call that began last is a reference's."""
        del self._losses[self._mark :]
        self._counts.several, self._counts.unreduced = self._before
        self._called_since.clear()
        self._trains, self._mark = True, None
        self.reference_begins()

    def reference_ended(self, output: Any) -> None:
        """Such a call ended with `output`; a loss of it that was heard inside is counted already."""
        if scalar_loss(output) is not None and self._counts.metrics == self._metrics:
            self._counts.metrics += 1

    def _count_out(self, beside: bool) -> None:
        if beside:
            self._counts.numbers += 1
        else:
            self._counts.rows += 1

    def training_ended(self, model: Any, output: Any) -> None:
        """A model's call with gradients ended with `output`."""
        losses = self.trains_by.called(model)
        if not losses.asks:
            return
        fields = getattr(type(output), "__dataclass_fields__", ())
        if not isinstance(output, Tensor | dict | tuple | list) and "loss" not in fields:
            output = {"loss": (_held(output, "__dict__") or {}).get("loss")}  # not what is computed when it is asked
        losses.returned(scalar_loss(output))

    def take(self, *, ended: bool = False) -> dict[int, Tensor]:
        """The mean of what was collected since the last call, by the number of steps that were made before.

        Of an evaluation before the first step it may not be known yet, unless the program has `ended`.
        """
        if not self._losses and not self._passes.open:
            return {}
        unknown = not (ended or self._steps() or self._measured.trained)
        if unknown and any(len(loss.measures) > 1 for loss in self._losses):
            return {}
        found: dict[int, dict[bool, list[_Loss]]] = {}
        for loss in self._losses:
            if loss.unsure and loss.returned is not None and loss.returned.apart:  # as is known by now
                self._count_out(loss.beside)
                continue
            found.setdefault(loss.steps, {}).setdefault(loss.ours, []).append(loss)
        self._losses.clear()
        self._passes.over()
        means = {}
        for steps, kinds in found.items():
            others = len(kinds.get(False, ()))
            if True in kinds:
                self._counts.aside += others
                self._counts.several -= sum(loss.further for loss in kinds.get(False, ()))
            else:
                self._counts.alone += others
            losses = kinds.get(True) or kinds[False]
            self._counts.taken += len(losses)
            chosen = [self._measured.which(loss.measures) for loss in losses]
            self._counts.sums += sum(measure.summed for measure in chosen)
            for loss in losses:
                if loss.returned is not None:
                    loss.returned.evaluated += 1
            device = chosen[-1].value.device
            means[steps] = torch.stack([measure.value.to(device) for measure in chosen]).mean()
        return means

    def facts(self) -> dict[str, list[int]]:
        """How many of the losses of evaluations are sums over their batches, and of how many; nothing if none is."""
        return {"eval_sums": [self._counts.sums, self._counts.taken]} if self._counts.sums else {}

    @property
    def notes(self) -> list[str]:
        """What an evaluation's mean has, or lacks, that nobody would think of."""
        return self.trains_by.notes(self._counts.taken) + self._unheard.notes + self._counts.notes(self._passes.most)
