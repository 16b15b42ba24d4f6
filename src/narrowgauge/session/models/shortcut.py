"""Steps that are left alone and are as the one before: told by seven functions instead of two dozen.

Between a program's own operations nothing of ours is in the processor's caches: each function, each object that it
looks at and each name that it looks up takes its part of a microsecond from memory. So while all is as usual
(`steps/usual.py`) one function or two stand where the ordinary ones do, and keep what they are told in one place
(`_Now`).

    where                                ordinary      as usual
    torch's hook for all modules         1 function    1: the model is called with gradients
    the model's own hooks                5             2: its call begins, and has ended
    torch.autograd.backward              3             2: on this loss, which is kept
    torch's hooks around optimizers      13            2: its rates; the step was made
    torch's clip functions               3             none: nobody is told of clips in steps that are left alone
    Optimizer.zero_grad                  2             1: behind the step
    torch's loss functions               3 each        1 each

Whatever is otherwise (an evaluation, another loss, optimizer or thread, the last of these steps) puts the ordinary ones
back into their places first, and they go on with what is known so far.

Not where anything is compiled (it asks what hooks there are), or more is followed: gradient scalers, closures that are
looked at, engines, other models, optimizers whose steps call their base class's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling import clock
from narrowgauge.compute.nn.tracing import optimizer_steps
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.optimizer_steps import OURS, Ended, Hook
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.models.alone import CallsAlone
from narrowgauge.session.models.frames import call_of
from narrowgauge.session.models.root import Around, Root
from narrowgauge.session.steps.ledger import float32, rates, together
from narrowgauge.session.steps.line import Line, Rates
from narrowgauge.session.steps.rows import PATIENCE, TOGETHER
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.updates import Updates

MOST_IN_VAIN = 4  # times that it was taken and no step made of it, after which it is not any more
_hooks, _cuda, _grad_enabled = nn.modules.module._global_forward_pre_hooks, torch.cuda, torch.is_grad_enabled
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


class _Now:
    """The step that is made, and whether the shortcut is taken at all."""

    __slots__ = (
        *("backwards", "begins", "called", "inside", "loss", "made", "on_host", "others", "rates", "stepping", "taken"),
        *("trainers", "until", "within"),
    )

    def __init__(self) -> None:
        self.taken = self.called = self.stepping = False
        self.begins = self.inside = self.within = False  # a model's call does; it runs; a backward
        self.backwards = self.made = 0  # made: so many steps, by the shortcut
        self.loss: Tensor | float | None = None
        self.rates: Rates = {}
        self.until: float = 0  # the step that ends it
        self.on_host = False  # where losses are, as those so far
        self.trainers: set[int] | None = None  # who makes all of these steps, if they have lines
        self.others: list[Ended] = []  # what is told as well that a step has ended

    @passed_over
    def keeps(self, loss: Tensor) -> bool:
        """Whether what backward is called on is one number, which is kept."""
        if self.trainers is None:
            return True
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


class _Ways(NamedTuple):
    """What stands in the places of the ordinary functions, for one model and the optimizer that makes its steps."""

    model: ReferenceType[nn.Module]
    by: ReferenceType[Optimizer]
    called: Callable[..., None]
    around: Callable[[Callable[..., None], Callable[..., None]], Around]
    around_step: tuple[Hook, Hook]


class Shortcut:
    """That of one program.

    Args:
        seams, hearing, steps, calls, updates: the session's.
        roots: the modules that the program calls.
    """

    def __init__(
        self, seams: Seams, hearing: Hearing, steps: Steps, calls: CallsAlone, updates: Updates, roots: Sized
    ) -> None:
        self._seams, self._hearing, self._steps, self._calls, self._updates = seams, hearing, steps, calls, updates
        self._roots = roots
        self._now = _Now()
        self._root: Root | None = None
        self._ways: _Ways | None = None
        self._hook: Callable[..., None] | None = None  # for all modules, the ordinary one
        self._in_vain = 0
        self._counts_later = False
        steps.usual.shorter = self
        seams.waits = self._now
        steps.evals.disturbed = self.leave
        seams.on_close(self.leave)

    def take(self, model: object, optimizer: Optimizer, line: Line | None) -> None:
        """Steps are as usual from here on: this is called in them, and that one makes them, the last of this line."""
        hook, ended, now, rest = self._calls.hook, self._updates.alone.hook, self._now, self._steps.rest
        if now.taken or not isinstance(model, Root) or hook is None or ended is None or not self._may():
            return
        if self._ways is None or self._ways.model is not model.reference or self._ways.by() is not optimizer:
            self._ways = self._made(model.reference, ref(optimizer), hook)
        ways = self._ways
        if not model.swap(ways.around):
            return
        others = optimizer_steps.swap(optimizer, ended, ways.around_step, self.leave)
        if others is None:
            model.swap(None)
            return
        self._counts_later = clock.nobody_counts()
        now.others = [told for told in others if not (self._counts_later and told is clock.count_step)]
        self._root, self._hook = model, hook
        now.trainers = None if rest.line is None else rest.line.trainers
        now.on_host = line is None or isinstance(line.loss, float)
        now.until, now.made = float("inf") if rest.until is None else rest.until, 0
        now.taken = True
        self._calls.hook = _hooks[OURS] = ways.called
        self._seams.swap_resting()
        self._seams.swap(torch.autograd, "backward", self._backward)
        self._steps.evals.shorten()
        self._calls.loading.alike = True

    @property
    def amid(self) -> bool:
        """Whether backward was called in a step that is not made."""
        return self._now.taken and self._now.backwards > 0

    def leave(self, *, begins: bool = False) -> None:
        """The ordinary functions are in their places again, and know what has come of the step that is made.

        A call of the model `begins`: if one runs, it is around this one.
        """
        now, rest, ledger = self._now, self._steps.rest, self._steps.ledger
        if not now.taken:
            return
        if now.begins:  # it was interrupted before it was one
            now.called = now.backwards > 0
        now.taken = self._calls.loading.alike = False
        self._seams.swap_back()
        optimizer_steps.swap_back()
        root, self._root = self._root, None
        if root is not None:
            root.swap(None)
        if self._calls.hook is not None and self._hook is not None:
            self._calls.hook = self._hook
            if not now.inside:
                _hooks[OURS] = self._hook
        self._in_vain = 0 if now.made else self._in_vain + 1
        if self._counts_later:
            clock.passed(now.made)
        rest.steps += now.made
        rest.called |= now.called
        if now.called:  # by a batch that was waited for
            self._calls.loading.of_thread.waited = 0.0
        if now.inside:
            self._running(root, 1 if begins else 0)
        self._steps.evals.fed |= now.called
        if (line := rest.line) is not None:
            line.step, line.loss, line.backwards = ledger.steps + 1, now.loss, now.backwards
            line.scalars.update({"lr": now.rates} if isinstance(now.rates, float) else now.rates)
        else:
            ledger.rows.pace.passed(now.made)
        self._hearing.waits |= now.within
        if now.stepping and self._ways is not None:
            self._updates.stepping = self._ways.by
        now.called = now.within = now.stepping = now.inside = now.begins = False
        now.backwards, now.loss, now.rates = 0, None, {}

    def _may(self) -> bool:
        """Whether nothing is followed in these steps but a model's call, its backward passes, and one optimizer."""
        rest, resting, updates = self._steps.rest, self._steps.resting, self._updates
        if not resting.quiet or resting.careful or rest.hands_on or len(rest.team) != 1 or len(self._roots) != 1:
            return False
        if self._in_vain >= MOST_IN_VAIN or self._hearing.deaf or updates.closures.depth or not self._steps.evals.idle:
            return False
        return not (updates.alone.others or updates.alone.scales or updates.engines.alone or updates.prepares)

    def _running(self, root: Root | None, within: int) -> None:
        """The model's call goes on, unless it was left without a word; so many more of it run `within`."""
        model = None if root is None else root.reference()
        call = None if model is None else call_of(model, within)
        if call is None:
            self._now.inside = False
            if self._calls.hook is not None:  # which left torch's place as it began
                _hooks[OURS] = self._calls.hook
            return
        running = self._calls.running
        running.call, running.root, running.alone, running.depth = call, root, True, 1

    def _made(self, model: ReferenceType[nn.Module], by: ReferenceType[Optimizer], hook: Callable[..., None]) -> _Ways:
        return _Ways(model, by, self._called(model, hook), partial(self._around, model), self._around_step(by))

    def _called(self, model: ReferenceType[nn.Module], ordinary: Callable[..., None]) -> Callable[..., None]:
        now, hearing, leave = self._now, self._hearing, self.leave

        @passed_over
        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module is model():
                if _grad_enabled() and hearing.ident == get_ident():
                    now.called = now.inside = now.begins = True
                    _hooks.pop(OURS, None)  # torch takes a longer way to each module while there is one
                    return
                leave()
            ordinary(module, args)

        return called

    def _around(
        self, model: ReferenceType[nn.Module], begins: Callable[..., None], ended: Callable[..., None]
    ) -> Around:
        now, calls, leave = self._now, self._calls, self.leave

        @passed_over
        def before(module: nn.Module, *given: Any) -> None:
            if now.begins and _grad_enabled():  # or the program's own hook was interrupted, and this is an evaluation
                now.begins = False
                return
            if module is model():  # it calls itself, or was left without a word, and torch's hook is not there
                leave(begins=True)
            begins(module, *given)

        @passed_over
        def after(module: nn.Module, *given: Any) -> None:
            if now.inside and module is model() and calls.hook is not None:
                now.inside = False
                _hooks[OURS] = calls.hook
            else:
                ended(module, *given)

        return before, after

    def _backward(self, ordinary: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
        now, hearing, rest, leave, kept = self._now, self._hearing, self._steps.rest, self.leave, self._now.keeps
        losses = self._updates.losses

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if now.within or not now.taken:  # one that a checkpoint calls within another's
                ordinary(tensors, *args, **kwargs)
                return
            usual = now.called and type(tensors) is Tensor and hearing.ident == get_ident() and not losses.scales
            if not usual or _modes() or _function_modes() or now.backwards == rest.backwards or not kept(tensors):
                leave()
                ordinary(tensors, *args, **kwargs)
                return
            now.backwards += 1
            now.within = hearing.waits = True
            try:
                original(tensors, *args, **kwargs)
            except BaseException:
                leave()
                self._updates.alone.backward_ended(failed=True)
                raise
            if not self._now.taken:  # something in it was heard
                self._updates.alone.backward_ended()
                return
            now.within = hearing.waits = False
            if now.stepping:  # called by a closure, which may set rates
                leave()
                self._updates.alone.backward_ended()

        return backward

    def _around_step(self, by: ReferenceType[Optimizer]) -> tuple[Hook, Hook]:
        now, leave, hearing, updates = self._now, self.leave, self._hearing, self._updates
        rest, ledger, usual = self._steps.rest, self._steps.ledger, self._steps.usual
        rows, held = ledger.rows, ledger.rows.held
        begins, ends = optimizer_steps.ordinary()

        @passed_over
        def stepping(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            if optimizer is not by() or updates.prepares:  # one that steps by another, say
                leave()
                return begins(optimizer, args, kwargs)
            now.stepping = True
            rate: Any = None
            for group in optimizer.param_groups:
                found = group["lr"]
                if type(found) is not float or (rate is not None and found != rate):
                    line = Line(0)
                    rates(line, optimizer)
                    rate = line.scalars
                    break
                rate = found
            now.rates = {} if rate is None else rate  # before the step, which may change them
            return None

        @passed_over
        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            loss, made, trainers = now.loss, ledger.steps + 1, now.trainers
            if (
                not (now.stepping and now.called and optimizer is by() and hearing.ident == get_ident())
                or (now.within or now.inside or now.backwards != rest.backwards or made >= now.until)
                or (
                    trainers is not None and (loss is None or (type(loss) is float and loss - loss != 0.0))
                )  # not finite
            ):
                leave()
                ends(optimizer, args, kwargs)
                return
            ledger.steps = made
            now.made += 1
            updates.ended += 1
            now.called = now.stepping = False
            now.backwards, now.loss = 0, None
            if trainers is not None:
                laps = ledger.clock
                if _cuda._initialized:
                    seconds, at = laps.lap(), laps.last
                    events, laps.pair = laps.pair, None
                else:
                    at, events = time.perf_counter(), None
                    seconds, laps.last = at - laps.last, at
                held.append(((trainers, made, loss, now.rates, seconds, events), rows.taker))
                if len(held) >= TOGETHER or at - rows.told > PATIENCE:
                    try:
                        rows.overdue()
                    except Exception as error:
                        hearing.kept("stepped", error)
            if usual.come_by is not None:
                usual.come_by(made + 1)
            for ended in now.others:
                ended(optimizer, False)

        return stepping, stepped
