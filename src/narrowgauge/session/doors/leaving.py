"""What leaves a program's models while they are watched has nothing of ours in it: copies, files, scripts.

    copy.deepcopy, torch.save, a process that is given a model    nn.Module.__reduce_ex__ leaves out our hooks
    torch.jit.script                                              would compile them: they are aside meanwhile; so are
                                                                  functions of ours in the place of torch's
    torch.export.export                                           refuses a module that is called with hooks: the same

Hooks that are objects of ours say themselves what a copy has in their place. Layers that the plan converted are plain
ones where a model is scripted, traced or exported: see tracing.py.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from narrowgauge.compute.nn.tracing.optimizer_steps import OURS
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.doors.tracing import Models, plainly, trace_plainly

SEAT = "_narrowgauge_seat"  # what a module has of ours beside a hook
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_SAID_OF_THEM = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def leave_models_clean(seams: Seams, models: Models | None = None) -> None:
    """Until the seams are closed, what leaves a model has no hook of ours; if the plan converts `models`, no layer."""
    plain = nullcontext if models is None else partial(plainly, models=models)
    seams.replace(nn.Module, "__reduce_ex__", _reducing)
    exports = [name for name in ("export", "draft_export", "export_for_training") if hasattr(torch.export, name)]
    for name in exports:
        seams.replace(torch.export, name, partial(_exporting, plain=plain))
    seams.is_held(torch.export, exports)
    scripting = getattr(torch.jit, "_recursive", None)
    if hasattr(scripting, "create_script_module"):
        seams.replace(scripting, "create_script_module", partial(_scripting, plain=plain))
    if hasattr(scripting, "try_compile_fn"):
        seams.replace(scripting, "try_compile_fn", lambda original: lambda fn, at: original(seams.original(fn), at))
    if models is not None:
        trace_plainly(seams, models)


def _reducing(original: Callable[..., Any]) -> Callable[..., Any]:
    inherited = original is object.__reduce_ex__

    def run(module: nn.Module, protocol: Any) -> Any:
        # What the program's class has behind nn.Module may be pickled in its own way.
        reduced = super(nn.Module, module).__reduce_ex__(protocol) if inherited else original(module, protocol)
        return tuple(map(_clean, reduced)) if isinstance(reduced, tuple) else reduced

    return run


def _scripting(original: Callable[..., Any], plain: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _aside(module), plain(module):
            return original(module, *args, **kwargs)

    return run


def _exporting(original: Callable[..., Any], plain: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    def run(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for_all = nn.modules.module._global_forward_pre_hooks
        ours = for_all.pop(OURS, None)
        try:
            with _aside(mod), plain(mod):
                return original(mod, *args, **kwargs)
        finally:
            if ours is not None:
                for_all[OURS] = ours

    return run


def _clean(part: Any) -> Any:
    """A part of what `__reduce_ex__` gave; a module's dict may be the state, or lie in it or among the arguments."""
    if type(part) is tuple:
        return tuple(map(_clean, part))
    if not isinstance(part, dict) or not any(part.get(name) for name in _HOOKS):
        return part
    ours = {at for name in _HOOKS for at, hook in (part.get(name) or {}).items() if _is_ours(hook)}
    return part if not ours else {name: value for name, value in part.items() if name != SEAT} | _without(part, ours)


def _without(state: dict[str, Any], ours: set[int]) -> dict[str, Any]:
    found = [name for name in (*_HOOKS, *_SAID_OF_THEM) if name in state]
    return {name: OrderedDict((at, hook) for at, hook in state[name].items() if at not in ours) for name in found}


@contextmanager
def _aside(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model's modules have no hook of ours."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for module in model.modules():
            state = vars(module)
            clean = _clean(state)
            if clean is not state:
                changed = (*_HOOKS, *_SAID_OF_THEM, SEAT)
                kept.append((module, {name: state[name] for name in changed if name in state}))
                state.update({name: clean[name] for name in changed if name in clean})
                state.pop(SEAT, None)
        yield
    finally:
        for module, before in kept:
            vars(module).update(before)


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return inspect.isroutine(hook) and str(getattr(hook, "__module__", "")).startswith("narrowgauge.session.")
