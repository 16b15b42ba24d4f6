"""What stands around the model's call.

    where                           ordinary      as usual
    torch's hook for all modules    1 function    1: the model is called
    the model's own hooks           5             2: its call begins, and has ended; more where what it is given and
                                                  returns is looked at

The first is out of its place while the call runs, and comes back as that ends. A call that a KeyboardInterrupt has left
ends without a word: whether it still runs is looked up once the shortcut is left.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.optimizer_steps import OURS
from narrowgauge.errors import let_pass
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.models.alone import CallsAlone
from narrowgauge.session.models.frames import call_of
from narrowgauge.session.models.root import Around, Root
from narrowgauge.session.shortcut.looks import Looks
from narrowgauge.session.shortcut.now import Leave, Now
from narrowgauge.session.steps.rest import Rest

_hooks, _grad_enabled = nn.modules.module._global_forward_pre_hooks, torch.is_grad_enabled
_parameters = nn.Module.parameters


def for_all_modules(
    now: Now,
    hearing: Hearing,
    rest: Rest,
    leave: Leave,
    model: ReferenceType[nn.Module],
    passes_by: Callable[[nn.Module], bool],
    ordinary: Callable[..., None],
) -> Callable[..., None]:
    """Torch's hook for all modules, in the place of the `ordinary` one; others' models it `passes_by`."""

    @passed_over
    def called(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is model():
            if hearing.ident == get_ident() and (now.waits or _grad_enabled()) and not rest.parted:
                if _grad_enabled():
                    now.called = now.begins = True
                else:
                    now.asked = True
                now.inside = True
                _hooks.pop(OURS, None)  # torch takes a longer way to each module while there is one
                return
            leave()
        elif now.beside and _grad_enabled():  # as `Meeting.known` says
            if module._parameters or module._modules:
                try:
                    if passes_by(module):
                        return
                except Exception as error:  # which is told of where it is asked carefully
                    let_pass(error)
            elif type(module).parameters is _parameters:
                return
        ordinary(module, args)

    return called


def of_model(
    now: Now,
    looks: Looks,
    calls: CallsAlone,
    leave: Leave,
    model: ReferenceType[nn.Module],
    begins: Callable[..., None],
    ended: Callable[..., None],
) -> Around:
    """The model's own hooks, in the places of those that tell that its call `begins`, and has `ended`."""

    @passed_over
    def before(module: nn.Module, *given: Any) -> None:
        if now.begins and _grad_enabled():  # or the program's own hook was interrupted, and this is an evaluation
            now.begins = False
            if not now.looks or looks.trains(given):
                return
        elif now.asked and looks.refers(module, given):
            now.asked = False
            return
        if module is model():  # it calls itself, or was left without a word, and torch's hook is not there
            leave(begins=True)
        begins(module, *given)

    @passed_over
    def after(module: nn.Module, *given: Any) -> None:
        if now.inside and module is model() and calls.hook is not None:
            if not now.asks or looks.returned(given):
                now.inside = False
                _hooks[OURS] = calls.hook
                return
            leave()
        ended(module, *given)

    return before, after


def goes_on(calls: CallsAlone, root: Root, within: int, *, refers: bool) -> None:
    """The model's call that began runs on by the ordinary hooks, if it does; so many more of it run `within`.

    Args:
        refers: it is a reference's.
    """
    model = root.reference()
    call = None if model is None else call_of(model, within)
    if call is not None:
        running = calls.running
        running.call, running.root, running.alone, running.depth = call, root, True, 1
        running.refers = refers
    elif calls.hook is not None:  # it was left without a word, and the hook that had made way for it is not back
        _hooks[OURS] = calls.hook
