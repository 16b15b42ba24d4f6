"""Optimizer steps are heard, each once, also where torch compiles them.

torch calls global hooks before and after every optimizer's step. Where the step is compiled it traces them with it, so
what they do must not happen while a graph is traced, and must happen each time that it runs.

    not compiled                     the hooks tell
    a step that breaks its graph     torch's own optimizers, nearly all, do before and after their updates: there it is
                                     told (`step_breaks`), and the hooks are traced and do nothing. No graph and no
                                     break more, and none less. With other hooks beside ours, or a closure, ours are
                                     left out of all graphs, and tell
    a step in one graph, or in the   an operator in that graph tells, twice; there is no break, and `fullgraph=True`
    graph of what is around it       is not refused

Of a graph's two calls the first reads what the step is about to change, and so comes before that. When the second
comes, the new weights need not be in their place yet (`telling`).
"""

from __future__ import annotations

import gc
import inspect
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from narrowgauge.compute.nn.tracing import step_breaks
from narrowgauge.compute.nn.tracing.marks import constant, not_compiled, passed_over
from narrowgauge.compute.nn.tracing.telling import tell, telling

# What is compiled asks whether the same global hooks are there, by their numbers. Ours has always this one, or what
# many watches see would be compiled anew for each, and given up after eight. torch's own are not negative.
OURS = -1

Begins = Callable[[Optimizer, Any, Any], Any]
Ended = Callable[[Optimizer, bool], None]
Hook = Callable[[Optimizer, Any, Any], Any]  # one of torch's

_BEGINS: dict[int, Begins] = {}
_ENDED: dict[int, Ended] = {}
_SWAPPED: list[Callable[[], None]] = []
_HANDLES: dict[int, Tensor] = {}  # by id: an optimizer need not be hashable
_PLAIN = (Tensor, nn.Parameter)  # others, as DTensor, take no operator that they do not know
_numbers = itertools.count()


def hear_steps(ended: Ended, begins: Begins | None = None) -> Callable[[], None]:
    """Hear every optimizer's steps; call what is returned to hear no more.

    Args:
        ended: called as `ended(optimizer, early)` when an optimizer has stepped; `early` if the new weights may not be
            in memory yet, but will be when the compiled function returns.
        begins: called as `begins(optimizer, args, kwargs)` before it steps; what it returns is as of torch's own
            hooks. In a graph it is called without arguments, and what it returns is lost.
    """
    interrupt()
    number = next(_numbers)
    _ENDED[number] = ended
    if begins is not None:
        _BEGINS[number] = begins
    _install()

    def remove() -> None:
        _ENDED.pop(number, None)
        _BEGINS.pop(number, None)
        _install()

    return remove


def _install() -> None:
    """Have both hooks of torch's where somebody listens, and none where nobody does: they would be traced for nothing.

    Also where nobody is told of steps that begin: the first that is compiled finds out how it is told before it breaks.
    """
    if not _BEGINS and not _ENDED:
        _global_optimizer_pre_hooks.pop(OURS, None)
        _global_optimizer_post_hooks.pop(OURS, None)
        step_breaks.forget()
        return
    _global_optimizer_pre_hooks[OURS], _global_optimizer_post_hooks[OURS] = _before, _after
    if step_breaks.asked():  # what was compiled then leaves it to this
        step_breaks.hear(_tell_between, _between)


def swap(
    optimizer: Optimizer, ended: Ended, hooks: tuple[Hook, Hook], interrupted: Callable[[], None]
) -> list[Ended] | None:
    """Have functions of a listener to this one in the places of our hooks (`ordinary`), until `swap_back`.

    For where nothing is compiled.

    Args:
        ended: what it gave to `hear_steps`.
        hooks: torch's, before each step and after.
        interrupted: called where somebody else is about to listen, or to count; it is to `swap_back`.
    Returns:
        What else is to be told of ended steps. None if nothing is done: somebody else is told of beginning ones, or its
        steps call its base class's.
    """
    before, after = _global_optimizer_pre_hooks.get(OURS), _global_optimizer_post_hooks.get(OURS)
    if len(_BEGINS) != 1 or nests(optimizer) or (before, after) != ordinary():
        return None
    _global_optimizer_pre_hooks[OURS], _global_optimizer_post_hooks[OURS] = hooks
    _SWAPPED.append(interrupted)
    return [listener for listener in _ENDED.values() if listener != ended]


def nests(optimizer: Optimizer) -> bool:
    """Whether the steps of its kind call their base class's, which torch hooks as well."""
    return type(optimizer) in _running.nested


def ordinary() -> tuple[Hook, Hook]:
    """Our hooks, before each step and after."""
    return _before, _after


def swap_back() -> None:
    """Undo `swap`."""
    _SWAPPED.clear()
    _install()


def interrupt() -> None:
    """Somebody is about to listen, or to count: our hooks are in their places again."""
    for interrupted in list(_SWAPPED):
        interrupted()


def settle() -> None:
    """The program compiles: what tells between graphs is in its place before any of them is made."""
    if _BEGINS or _ENDED:
        step_breaks.hear(_tell_between, _between)


def _tell_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    changed = False
    for begins in list(_BEGINS.values()):
        result = begins(optimizer, args, kwargs)
        if result is not None:
            changed, (args, kwargs) = True, result
    return (args, kwargs) if changed else None


def _tell_ended(optimizer: Optimizer, early: bool = False) -> None:
    for ended in list(_ENDED.values()):
        ended(optimizer, early)


class _Running(threading.local):
    """Steps that run on this thread: one that calls its base class's, which torch hooks as well, is one."""

    def __init__(self) -> None:
        self.inner: dict[int, int] = {}  # by the optimizers' ids: how many of each run inside of its outermost
        self.nested: set[type[Optimizer]] = set()  # of which there were such

    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer's step begins; whether it is an outermost."""
        number = id(optimizer)
        if number in self.inner and _steps_already(optimizer):  # or that one was left by an error
            self.inner[number] += 1
            self.nested.add(type(optimizer))
            return False
        self.inner[number] = 0
        return True


def _steps_already(optimizer: Optimizer) -> bool:
    """Whether what calls its step is its step."""
    running, frame = 0, inspect.currentframe()
    while frame is not None:
        running += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return running > 1


_running, _STEP = _Running(), Optimizer.profile_hook_step(_tell_ended).__code__  # around every step, by torch

_tell_begins_uncompiled, _tell_ended_uncompiled = not_compiled(_tell_begins), not_compiled(_tell_ended)


def _tell_between(optimizer: Optimizer, ended: bool) -> None:
    if ended:
        _tell_ended(optimizer)
    else:
        _tell_begins(optimizer, (optimizer,), {})


# What follows is traced: nothing in it may depend on who listens, or change anything.

IN_GRAPH, BETWEEN, BREAKS = "in its graph", "between graphs", "breaks"


@partial(passed_over, below=True)
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        if len(_BEGINS) != 1 or id(optimizer) in _running.inner:
            return _tell_begins(optimizer, args, kwargs) if _running.begins(optimizer) else None
        _running.inner[id(optimizer)] = 0  # as mostly: each function that is called here takes microseconds
        (begins,) = _BEGINS.values()
        return begins(optimizer, args, kwargs)
    way = BREAKS if _closure(args, kwargs) else _way(type(optimizer))
    if way == IN_GRAPH and hasattr(optimizer, "_narrowgauge_handle"):
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        changed = weights + [p.grad for p in weights if p.grad is not None]
        tell(optimizer._narrowgauge_handle, 0, [x for x in changed if type(x) in _PLAIN])
        return None
    if way == BETWEEN and _alone(optimizer):
        return None
    return _tell_begins_uncompiled(optimizer, args, kwargs)


@partial(passed_over, below=True)
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        number = id(optimizer)
        if inner := _running.inner.pop(number, 0):
            _running.inner[number] = inner - 1
            return
        told = step_breaks.TELLS and step_breaks.resumed() and _between(optimizer, args, kwargs)
        if not told or _way(type(optimizer)) != BETWEEN:
            for ended in list(_ENDED.values()):
                ended(optimizer, False)
        return
    way = BREAKS if _closure(args, kwargs) else _way(type(optimizer))
    if way == IN_GRAPH and hasattr(optimizer, "_narrowgauge_handle"):
        tell(optimizer._narrowgauge_handle, 1, [])
    elif way != BETWEEN or not _alone(optimizer):
        _tell_ended_uncompiled(optimizer)


def _between(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether a step that breaks its graph can be told between its graphs: else our hooks tell."""
    return not _closure(args, kwargs) and _alone(optimizer)


def _alone(optimizer: Optimizer) -> bool:
    """Whether no hook of the program's is called between ours and the updates."""
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for number in hooks:
            if number != OURS:
                return False
    return not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def _closure(args: Any, kwargs: Any) -> bool:
    """Whether a step is given a closure: it runs a backward pass, which is in no graph."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


@constant
def _way(kind: type[Optimizer]) -> str:
    """How a step of this kind of optimizer tells; if in its graph, they all have handles now.

    A trace can hand over no optimizer (torch 2.10), so all of them are looked up, once per trace.
    """
    step: Any = kind.step
    while step is not None:
        code = getattr(step, "__code__", None)
        if hasattr(step, "_torchdynamo_disable") or (code is not None and "graph_break" in code.co_names):
            return BETWEEN if step_breaks.makes(step) and step_breaks.hear(_tell_between, _between) else BREAKS
        step = getattr(step, "__wrapped__", None)
    for found in gc.get_objects():
        if type(found) is kind:
            _give_handle(found)
    return IN_GRAPH


def _give_handle(optimizer: Any) -> None:
    number, attributes = id(optimizer), vars(optimizer)  # past what a class makes of getting and setting
    handle = attributes.get("_narrowgauge_handle")
    if handle is not None and _HANDLES.get(number) is handle:  # and not copied from another
        return
    known = ref(optimizer)

    def told(what: int, reads: list[Tensor]) -> None:
        stepping = known()
        if stepping is not None:
            _tell_ended(stepping, True) if what else _tell_begins(stepping, (stepping,), {})

    handle, forget = telling(told)
    attributes["_narrowgauge_handle"] = _HANDLES[number] = handle

    def gone() -> None:
        if _HANDLES.get(number) is handle:
            del _HANDLES[number]
        forget()

    finalize(optimizer, gone)
