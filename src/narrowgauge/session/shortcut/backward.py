"""What stands in the place of torch.autograd.backward.

where                      ordinary       as usual
torch.autograd.backward    3 functions    2: on this loss, which is kept
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.updating import INPUTS, reaches_no_parameter
from narrowgauge.session.shortcut.now import Leave, Now
from narrowgauge.session.steps.rest import Rest
from narrowgauge.session.steps.updates import Updates

_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def in_place_of(
    now: Now,
    hearing: Hearing,
    rest: Rest,
    updates: Updates,
    leave: Leave,
    ordinary: Callable[..., None],
    original: Callable[..., None],
) -> Callable[..., None]:
    """What is called in the place of the `ordinary` function, which stands in that of the `original`, torch's."""
    kept, losses, alone = now.keeps, updates.losses, updates.alone

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if now.beside and now.taken and not (now.within or now.theirs) and alone.is_of_others(tensors):
            now.theirs = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                now.theirs = False
            return
        taken = now.taken  # asked again below: what is heard meanwhile ends it
        some = kwargs.get("inputs") is not None or len(args) > INPUTS
        if now.within or now.theirs or not taken or (some and reaches_no_parameter(args, kwargs)):
            ordinary(tensors, *args, **kwargs)  # within, that is one that a checkpoint calls within another's
            return
        usual = now.called and type(tensors) is Tensor and hearing.ident == get_ident() and not losses.scales
        usual = usual and not _modes() and not _function_modes() and not rest.parted
        tries = now.tries
        if usual and now.looks and not tries:
            if now.zeroed and now.other:
                now.throw()
            now.zeroed = now.other = False
        if not (usual and (tries or (now.backwards < rest.counted and kept(tensors)))):
            leave()
            ordinary(tensors, *args, **kwargs)
            return
        now.backwards += not tries
        now.waits = False
        now.within = hearing.waits = True
        try:
            original(tensors, *args, **kwargs)
        except BaseException:
            leave()
            alone.backward_ended(failed=True)
            raise
        if not now.taken:  # something in it was heard
            alone.backward_ended()
            return
        now.within = hearing.waits = False
        if now.stepping and not (now.evaluates or tries):  # called by the step itself, which may set rates
            leave()
            alone.backward_ended()

    return backward
