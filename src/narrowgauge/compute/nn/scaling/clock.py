"""The step clock: when does one step end and the next begin, whoever's training loop this is.

    recorded forward or backward          -> this step has data
    optimizer.step() of a followed model  -> if it has data: the step ends, every listener advances once

So two optimizers advance the state once (the second finds no data), a GradScaler that skips `step()` not at
all, a closure that runs forward and backward many times once, accumulation over microbatches once. The hook
is torch's global one, installed once, and filtered by who owns the stepped parameters; optimizers made before
or after conversion are the same to it. Forwards without grad and recomputed ones never count as data.

A replayed CUDA graph tells nothing. Once one was captured, every step of the optimizer that ended the last one counts.

An optimizer may also step *inside* a backward pass (one per parameter, to free gradients early). The step is
then still running, so it ends at the next forward or the next optimizer step outside of a backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.resume_warnings import warn_unowned
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.optimizer_steps import hear_steps, interrupt

_PATIENCE = 8  # steps by optimizers that own nothing, before the first that does


class StepClock:
    """Counts the optimizer steps of the models it follows, and tells listeners when one has ended.

    `step` is the number of steps that ended so far.
    """

    def __init__(self) -> None:
        self.step = 0
        self._has_data = False
        self._ended_inside_backward = False
        self._replays = False
        self._leader: weakref.ref[Optimizer] | None = None
        self._strange_steps = 0
        self._new_to_strangers = False
        self._listeners: list[Callable[[], None]] = []
        self._first: Callable[[Optimizer], None] | None = None
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._known: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()  # by id
        _CLOCKS[id(self)] = self
        _install_hook()

    def follow(self, module: nn.Module) -> None:
        """Count steps of optimizers that own any parameter of `module`; held weakly."""
        global _followed
        if not _followed:
            _followed = True
            interrupt()
        self._modules.add(module)

    def follows(self, module: nn.Module) -> bool:
        """Return whether `module` was given to `follow`."""
        return module in self._modules

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener()` once at the end of every step."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def on_first_step(self, listener: Callable[[Optimizer], None]) -> None:
        """Call `listener(optimizer)` once, when the first step after conversion ends."""
        self._first = listener

    def catch_up(self) -> None:
        """End the step of an optimizer that stepped inside a backward, once that is over; forwards and saving ask."""
        if self._ended_inside_backward and not inside_backward():
            self._end_step()

    def saw_data(self) -> None:
        """Note that the running step recorded something: it is worth ending."""
        self._has_data = self._new_to_strangers = True

    def captured(self) -> None:
        """Note that a CUDA graph will repeat what runs now, and `saw_data` will not be heard of again."""
        self._replays = True

    @property
    def has_data(self) -> bool:
        """Whether anything was recorded since the last step ended."""
        return self._has_data

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """End the step if it has data and `optimizer` owns parameters of a followed module."""
        if not self._has_data and not self._replayed_for(optimizer):
            return
        if not self._owns(optimizer):
            self._stepped_by_a_stranger()
            return
        if self._first is not None:
            listener, self._first = self._first, None
            listener(optimizer)
        self._leader = weakref.ref(optimizer)
        if inside_backward():
            self._ended_inside_backward = True
        else:
            self._end_step()

    def _replayed_for(self, optimizer: Optimizer) -> bool:
        # Of several optimizers, the one that ended the last step ends this one too.
        return self._replays and self._leader is not None and self._leader() is optimizer

    def _end_step(self) -> None:
        self._has_data = self._ended_inside_backward = False
        self.step += 1
        for listener in self._listeners:
            listener()

    def _stepped_by_a_stranger(self) -> None:
        # A discriminator's optimizer, perhaps; but an optimizer of master copies looks the same, for ever.
        if self._listeners and self.step == 0 and self._new_to_strangers:
            self._new_to_strangers = False  # a model that ran once and is left lying there is none of their business
            self._strange_steps += 1
            if self._strange_steps == _PATIENCE:
                warn_unowned(_PATIENCE)

    def _owns(self, optimizer: Optimizer) -> bool:
        # Only a yes is remembered: a parameter group may be added later.
        if self._known.get(id(optimizer)) is optimizer:
            return True
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owns = any(id(p) in stepped for module in self._modules for p in module.parameters())
        if owns:
            self._known[id(optimizer)] = optimizer
        return owns

    def __deepcopy__(self, memo: dict[int, Any]) -> StepClock:
        """A copy that follows the copied modules. Listeners subscribe again by themselves."""
        twin = object.__new__(StepClock)
        memo[id(self)] = twin
        twin.__setstate__(self.__getstate__())
        for module in self._modules:
            copied = memo.get(id(module))
            if isinstance(copied, nn.Module):
                twin.follow(copied)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Numbers only: a pickled clock finds its modules again as they run."""
        return {"step": self.step, "has_data": self._has_data, "ended": self._ended_inside_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        StepClock.__init__(self)
        self.step, self._has_data, self._ended_inside_backward = state["step"], state["has_data"], state["ended"]


# The number of the pass that this thread runs: `inside_backward` where microseconds count.
backward_task, NO_TASK = torch._C._current_graph_task_id, -1


@passed_over
def inside_backward() -> bool:
    """Return whether this thread runs a backward pass: a forward that runs now is a recomputed one."""
    return bool(backward_task() != NO_TASK)


_CLOCKS: weakref.WeakValueDictionary[int, StepClock] = weakref.WeakValueDictionary()
_heard: Any = None
_optimizer_steps = 0
_followed = False


def optimizer_steps() -> int:
    """How many steps optimizers have made in this process, whoever's parameters they own."""
    return _optimizer_steps


def _install_hook() -> None:
    global _heard
    if _heard is None:
        _heard = hear_steps(count_step)


def nobody_counts() -> bool:
    """Whether no module's steps were ever counted. Then they may be told of later, so many at once (`passed`)."""
    return not _followed


def passed(steps: int) -> None:
    """So many steps were made, of which nobody was told."""
    global _optimizer_steps
    _optimizer_steps += steps


def count_step(optimizer: Optimizer, early: bool) -> None:
    """An optimizer has stepped."""
    global _optimizer_steps
    _optimizer_steps += 1
    for held in _CLOCKS.valuerefs():
        clock = held()
        if clock is not None and (clock._has_data or clock._replays):
            clock.optimizer_stepped(optimizer)
