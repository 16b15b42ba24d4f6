"""When steps are told of by the fewest functions; how these come to their places, and leave them.

    where                    ordinary         as usual
    torch's clip functions   3 functions      none: nobody is told of clips in steps that are left alone
    Optimizer.zero_grad      2                1: behind the step
    torch's loss functions   3 each           1 each

The others are in the modules beside. Whatever is otherwise (an evaluation, another loss, optimizer or thread, the last
of these steps) puts the ordinary ones back into their places first, and they go on with what is known so far.

Not where anything is compiled (it asks what hooks there are), or more is followed: gradient scalers, engines, several
models, optimizers whose steps call their base class's.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling import clock
from narrowgauge.compute.nn.tracing import optimizer_steps
from narrowgauge.compute.nn.tracing.optimizer_steps import OURS, Hook
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.models.alone import CallsAlone
from narrowgauge.session.models.root import Around, Root
from narrowgauge.session.shortcut import backward, call_hooks, step_hooks
from narrowgauge.session.shortcut.looks import Looks, able
from narrowgauge.session.shortcut.now import Now
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.steps.updates import Updates

MOST_IN_VAIN = 4  # times that it was taken and no step made of it, after which it is not any more
WORTH = 16  # steps that were made of it, behind which it is taken again as soon as one is as usual
_hooks = nn.modules.module._global_forward_pre_hooks


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
        optimizers: those that the program made and still holds.
    """

    def __init__(
        self,
        seams: Seams,
        hearing: Hearing,
        steps: Steps,
        calls: CallsAlone,
        updates: Updates,
        roots: Sized,
        optimizers: Trained,
    ) -> None:
        self._seams, self._hearing, self._steps, self._calls, self._updates = seams, hearing, steps, calls, updates
        self._roots, self._optimizers = roots, optimizers
        self._now = Now()
        self._looks = Looks(self._now, hearing, steps, calls.thread, updates.none_left)
        self._now.clears = self._looks.zeroed
        self._root: Root | None = None
        self._ways: _Ways | None = None
        self._hook: Callable[..., None] | None = None  # for all modules, the ordinary one
        self._backward = partial(backward.in_place_of, self._now, hearing, steps.rest, updates, self.leave)
        self._able = able()
        self._in_vain = 0
        self._counts_later = False
        steps.usual.shorter = self
        seams.waits = self._now
        steps.evals.disturbed = self.leave
        seams.on_close(self.leave)

    def take(self, model: object, optimizer: Optimizer, line: Line | None) -> None:
        """Steps are as usual from here on: this is called in them, and that one makes them, the last of this line."""
        hook, ended = self._calls.hook, self._updates.alone.hook
        if self._now.taken or not isinstance(model, Root) or hook is None or ended is None or not self._may():
            return
        ways = self._ways_of(model, optimizer, hook)
        if not model.swap(ways.around):
            return
        others = optimizer_steps.swap(optimizer, ended, ways.around_step, self.leave)
        if others is None:
            model.swap(None)
            return
        self._counts_later = clock.nobody_counts()
        others = [told for told in others if not (self._counts_later and told is clock.count_step)]
        self._root, self._hook = model, hook
        self._looks.begin(id(model), optimizer if len(self._optimizers) == 1 else None)
        self._now.looks, self._now.asks = self._steps.resting.careful, self._steps.references.asks
        self._now.beside = self._updates.alone.others
        self._now.begin(self._steps.rest, line, others)
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
        now = self._now
        if not now.taken:
            return
        if now.begins:  # it was interrupted before it was one
            now.called = now.backwards > 0
        now.taken = self._calls.loading.alike = False
        self._put_back(1 if begins else 0)
        self._in_vain = 0 if now.made else self._in_vain + 1
        if now.made >= WORTH:
            self._steps.usual.look_again()
        self._hand_over()
        now.forget()

    def _may(self) -> bool:
        """Whether nothing is followed in these steps but a model's calls, its backward passes and its optimizers."""
        rest, references, updates = self._steps.rest, self._steps.references, self._updates
        if not self._steps.resting.quiet or len(self._roots) != 1 or any(map(optimizer_steps.nests, rest.makers)):
            return False
        if rest.hands_on and not (references.asks and references.seen):
            return False
        if self._steps.resting.careful and not self._able:
            return False
        if rest.keeps and not rest.counted:  # it knows of calls of backward alone
            return False
        if self._in_vain >= MOST_IN_VAIN or self._hearing.deaf or updates.closures.depth or not self._steps.evals.idle:
            return False
        return not (updates.alone.scales or updates.engines.alone or updates.prepares)

    def _ways_of(self, root: Root, optimizer: Optimizer, hook: Callable[..., None]) -> _Ways:
        """Those of this model and this optimizer; as they were, if they are of these."""
        ways, model, now, hearing, leave = self._ways, root.reference, self._now, self._hearing, self.leave
        if ways is None or ways.model is not model or ways.by() is not optimizer:
            by = ref(optimizer)
            called = call_hooks.for_all_modules(
                now, hearing, self._steps.rest, leave, model, self._optimizers.passes_by, hook
            )
            around = partial(call_hooks.of_model, now, self._looks, self._calls, leave, model)
            around_step = step_hooks.around_step(now, hearing, self._steps, self._updates, leave, by)
            ways = self._ways = _Ways(model, by, called, around, around_step)
        return ways

    def _put_back(self, within: int) -> None:
        """The ordinary functions are in their places; if the model's call runs, so many more of it run `within`."""
        self._seams.swap_back()
        optimizer_steps.swap_back()
        root, self._root = self._root, None
        if root is not None:
            root.swap(None)
        if self._calls.hook is not None and self._hook is not None:
            self._calls.hook = self._hook
            if not self._now.inside:
                _hooks[OURS] = self._hook
        if root is not None and self._now.inside:
            call_hooks.goes_on(self._calls, root, within, refers=self._now.refers)

    def _hand_over(self) -> None:
        """The ordinary functions know of the steps that were made, and what is known of the one that is."""
        now, rest, ledger = self._now, self._steps.rest, self._steps.ledger
        if self._counts_later:
            clock.passed(now.made + now.passed)
        rest.steps += now.made
        rest.called |= now.called
        if now.called:  # by a batch that was waited for
            self._calls.loading.of_thread.waited = 0.0
        self._steps.evals.fed |= now.called
        self._steps.thrown_away += now.thrown
        self._steps.resting.zeroes |= now.zeroes
        if now.looks:
            self._looks.tell()
        if now.refers:
            self._steps.evals.reference_begins()
        if now.met:
            self._steps.references.called(ledger.steps + 1, now.backwards, waits=now.waits)
        if rest.line is not None:
            now.put_into(rest.line, ledger.steps + 1)
        else:
            ledger.rows.pace.passed(now.made)
        self._hearing.waits |= now.within
        if now.stepping and self._ways is not None:
            self._updates.stepping = now.by if now.parts else self._ways.by
        if now.evaluates:
            self._updates.closures.evaluates()
        self._updates.closures.again |= now.evaluated
