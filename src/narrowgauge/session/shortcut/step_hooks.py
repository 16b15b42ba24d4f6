"""What stands around the optimizer's step.

where                              ordinary        as usual
torch's hooks around optimizers    13 functions    2: its rates; the step was made; 6 of two optimizers
a closure that it is given         9               1 around its first call, 3 around each that it only tries
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial, update_wrapper
from threading import get_ident
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.tracing import optimizer_steps
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.optimizer_steps import Hook
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.doors.updating import closure_of, with_closure
from narrowgauge.session.shortcut.now import Leave, Now
from narrowgauge.session.steps.ledger import rates
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.looking import MOST_RATES, take_rates
from narrowgauge.session.steps.rows import PATIENCE, TOGETHER
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.updates import Updates

_cuda = torch.cuda


def around_step(
    now: Now,
    hearing: Hearing,
    steps: Steps,
    updates: Updates,
    leave: Leave,
    by: ReferenceType[Optimizer],
) -> tuple[Hook, Hook]:
    """Torch's hooks before a step of this optimizer and after: for `optimizer_steps.swap`."""
    rest, ledger, usual = steps.rest, steps.ledger, steps.usual
    rows, held = ledger.rows, ledger.rows.held
    begins, ends = optimizer_steps.ordinary()
    closures = updates.closures

    @passed_over
    @unseen
    def evaluate(optimizer: Optimizer, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = now.taken and not now.evaluated
        if first:
            now.evaluates = True
        else:
            now.tries = now.taken
            closures.again |= now.taken
            closures.evaluates()
        try:
            return closure(*args, **kwargs)
        finally:
            if first and now.taken:
                now.evaluates, now.evaluated = False, True
                line = Line(0)
                rates(line, optimizer)  # which it may have set
                now.rates = line.scalars
            else:
                now.tries = False
                closures.evaluates(optimizer)

    @passed_over
    def stepping(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if now.parts:
            number = id(optimizer)
            known = number in rest.team and number not in rest.parted and not now.stepping
            known = known and not ((len(args) > 1 or kwargs) and closure_of(args, kwargs))
        else:
            known = optimizer is by()
        known = known and hearing.ident == get_ident()
        if not known or updates.prepares or now.evaluated:  # one that steps by another, say; or it raised
            if now.beside and not (updates.prepares or updates.follows(optimizer)):
                return None
            leave()
            return begins(optimizer, args, kwargs)
        now.stepping = True
        if now.parts:
            now.by = ref(optimizer)
            if now.trainers is not None:
                groups, rated = optimizer.param_groups, now.rated
                rate = groups[0].get("lr") if len(groups) == 1 else None
                if type(rate) is float and len(rated) < MOST_RATES:  # as mostly
                    rated[id(groups[0])] = rate
                else:
                    take_rates(rated, optimizer)
            return None
        rate = None
        for group in optimizer.param_groups:
            found = group.get("lr")
            if type(found) is not float or (rate is not None and found != rate):
                line = Line(0)
                rates(line, optimizer)
                rate = line.scalars
                break
            rate = found
        now.rates = {} if rate is None else rate  # before the step, which may change them
        closure = closure_of(args, kwargs) if len(args) > 1 or kwargs else None
        if not callable(closure):
            return None
        return with_closure(update_wrapper(partial(evaluate, optimizer, closure), closure), args, kwargs)

    @passed_over
    def took_part(optimizer: Optimizer) -> bool:
        if not now.stepping or now.by is None or now.by() is not optimizer or hearing.ident != get_ident():
            return False
        if now.within or now.inside or not now.called:
            return False
        rest.parted[id(optimizer)] = optimizer
        now.stepping = False
        updates.ended += 1
        now.passed += 1
        if usual.come_by is not None and len(rest.parted) == 1:
            usual.come_by(ledger.steps + 2)
        for ended in now.others:
            ended(optimizer, False)
        return True

    @passed_over
    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        loss, made, trainers = now.loss, ledger.steps + 1, now.trainers
        if now.beside and optimizer is not by() and not (updates.prepares or updates.follows(optimizer)):
            now.passed += 1
            for ended in now.others:
                ended(optimizer, False)
            return
        parted = rest.parted
        if now.parts and optimizer is not by() and took_part(optimizer):
            return
        heard = trainers is None or (
            now.vectors == now.most_vectors
            and (loss is None) is (now.backwards - now.elsewhere == now.vectors)
            and not (type(loss) is float and loss - loss != 0.0)  # not finite
        )
        if (
            not (heard and now.stepping and now.called and optimizer is by() and hearing.ident == get_ident())
            or (now.within or now.inside or now.backwards != rest.counted or made >= now.until)
            or (now.parts and len(parted) != len(rest.team) - 1)
        ):
            leave()
            ends(optimizer, args, kwargs)
            return
        ledger.steps = made
        now.made += 1
        updates.ended += 1
        if now.evaluated:
            now.evaluated = closures.again = False
        now.called = now.stepping = False
        now.backwards, now.vectors, now.loss = 0, 0, None
        if now.looks:
            now.elsewhere, now.met, now.waits, now.zeroed, now.other = 0, False, False, False, False
        if trainers is not None:
            laps = ledger.clock
            if _cuda._initialized:
                seconds, at = laps.lap(), laps.last
                events, laps.pair = laps.pair, None
            else:
                at, events = time.perf_counter(), None
                seconds, laps.last = at - laps.last, at
            rates_then = now.all_rates() if now.parts else now.rates
            held.append(((trainers, made, loss, rates_then, seconds, events), rows.taker))
            if len(held) >= TOGETHER or at - rows.told > PATIENCE:
                try:
                    rows.overdue()
                except Exception as error:
                    hearing.kept("stepped", error)
        if now.parts:
            parted.clear()
            now.rated.clear()
        elif usual.come_by is not None:  # or the first of them came by
            usual.come_by(made + 1)
        for ended in now.others:
            ended(optimizer, False)

    return stepping, stepped
