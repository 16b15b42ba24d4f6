"""The tape: how a training script got from its model's output to its loss, kept so that it can be done again.

    outermost module calls     one opaque entry each: module, arguments, random states, modes
    torch functions between    recorded one by one (a TorchFunctionMode), when they touch a recorded value or a weight
    everything else            a constant, held by reference together with its version counter

`close(loss)` keeps only what the loss depends on and lets every other tensor go, so nothing but constants stays in
memory during the real backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge.errors import let_pass
from narrowgauge.session.same_weights import function_modes
from narrowgauge.session.same_weights.ambient import Modes, Rng
from narrowgauge.session.same_weights.called_models import CalledModels, kept_tensors
from narrowgauge.session.same_weights.effects import GET_GRAD, READS, SET_DATA, in_place_target, refusal
from narrowgauge.session.same_weights.plan import Entry, NotMeasurable, Plan, plan_of
from narrowgauge.session.same_weights.slots import Slots
from narrowgauge.session.same_weights.tree import Const, External, Node, Slot, freeze, tensors


class Tape(TorchFunctionMode):
    """Records from the first call of a model to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = ""
        self._entries: list[Entry] = []
        self._slots = Slots()
        self._reads: list[tuple[int, str]] = []
        self._models = CalledModels()
        self._scales: dict[int, Tensor] = {}
        self._depth = 0
        self._open = False
        self._call: Entry | None = None
        self._undo = ExitStack()

    # Being on or off.

    def start(self) -> None:
        """Listen to torch functions, custom autograd functions and gradient scalers."""
        for mode in function_modes.present():
            if isinstance(mode, Tape) and not mode._open:  # left here when this thread lost its turn
                function_modes.remove(mode)
        foreign = function_modes.others()
        if foreign:
            raise NotMeasurable(f"the script runs under a torch function mode of its own ({foreign[0]})")
        self._open = True
        self._undo = function_modes.patches(self)
        function_modes.insert(self)

    def stop(self) -> None:
        """Listen no more; safe to call at any time."""
        self._open = False
        self._undo.close()
        function_modes.remove(self)

    def fail(self, why: str) -> None:
        """Remember the first reason why this tape is of no use."""
        self.failed = self.failed or why

    @property
    def recording(self) -> bool:
        """Whether calls are recorded now: on, and not inside of a recorded call."""
        return self._open and self._depth == 0 and not self.failed

    # What is recorded.

    def module_begins(self, module: nn.Module, args: Any, kwargs: Any, whole: nn.Module | None = None) -> None:
        """An outermost module call begins; what happens inside belongs to it."""
        self._depth += 1
        if self._depth > 1:
            self._models.add(whole or module)
            return
        function_modes.remove(self)
        self._models.add(whole or module)
        self._call = self._entry(type(module).__name__, module, args, kwargs, Rng.now())

    def module_ends(self, module: nn.Module, output: Any) -> None:
        """It returned."""
        self._depth -= 1
        if self._depth:
            return
        entry, self._call = self._call, None
        if entry is not None:
            self._finish(entry, output)
            for part, name, key, tensor in kept_tensors(module):  # these are outputs as well
                if tensor not in self._slots:
                    slot = self._slots.put(tensor)
                    entry.attributes.append((slot, part, name, key))
                    entry.writes.add(self._slots.keys[slot])
        if self._open:
            function_modes.insert(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and record it."""
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        return self.run(func, getattr(func, "__name__", str(func)), args, kwargs)

    def run(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, *, opaque: bool = False) -> Any:
        """Run `func` and record it; `opaque` when the function modes are on while it runs."""
        self._depth += 1  # neither what runs inside nor the bookkeeping itself is recorded
        try:
            entry = self._safely(name, lambda: self._begin(func, name, args, kwargs, opaque))
            out = func(*args, **kwargs)
            if entry is not None:
                self._safely(name, lambda: self._end(entry, name, out))
            return out
        finally:
            self._depth -= 1

    def _safely(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            let_pass(error)
            self.fail(f"{name} could not be recorded ({type(error).__name__}: {error})")
            return None

    def _begin(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, opaque: bool) -> Entry | None:
        if func == GET_GRAD:
            return None  # zeroing gradients before backward is no part of the loss
        inputs = tensors((args, kwargs))
        if func == SET_DATA and any(t in self._slots for t in inputs):
            self.fail("the script assigns to .data of a tensor on the way to its loss")
        grad = torch.is_grad_enabled()
        if not (any(self._slots.concerns(t, grad) for t in inputs) or self._has_number(args)):
            return None
        target = in_place_target(name, args, kwargs)
        if target is not None and target not in self._slots:
            self._adopt(target)
        entry = self._entry(name, func, args, kwargs, Rng.now(whole=opaque))
        entry.problem = entry.problem or refusal(name)
        if func is torch.autograd.grad:
            entry.problem = "the script calls torch.autograd.grad on the way to its loss"
        self._versions = [(t, t._version) for t in inputs if t in self._slots and not t.is_inference()]
        self._target = target
        return entry

    def _has_number(self, args: Any) -> bool:
        return any(type(x) is float and x in self._slots for x in args)

    def _end(self, entry: Entry, name: str, out: Any) -> None:
        if name in READS:
            self._reads.append((len(self._entries), name))
        if entry.rng is not None and entry.rng.python is None and entry.rng.same(Rng.now(whole=False)):
            entry.rng = None
        mutated = [t for t, version in self._versions if t._version != version]
        if self._target is not None and all(t is not self._target for t in mutated):
            mutated.append(self._target)
        for tensor in mutated:
            entry.writes.add(self._slots.mutated(tensor))
        self._finish(entry, out, keep=bool(mutated))

    def _entry(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, rng: Rng | None) -> Entry:
        entry = Entry(name, call, Const(None), Modes.now(), rng)

        def leaf(x: Tensor | float) -> Node:
            slot = self._slots.of(x)
            if slot is None:
                return Const(x) if isinstance(x, float) else self._external(x, entry)
            if isinstance(x, Tensor) and self._slots.unfollowed(x, slot):
                entry.problem = "the loss goes through a custom autograd function that could not be followed"
            entry.reads.add(self._slots.keys[slot])
            return Slot(slot)

        entry.args = freeze((tuple(args), dict(kwargs)), leaf)
        return entry

    def _external(self, tensor: Tensor, entry: Entry) -> External:
        if tensor.grad_fn is not None:
            entry.problem = "the loss depends on a tensor with gradients that was computed where it cannot be seen"
        if self._slots.written(tensor):
            entry.problem = "the loss depends on a tensor that shares memory with one that the script wrote to"
        return External(tensor, -1 if tensor.is_inference() else tensor._version)

    def _finish(self, entry: Entry, out: Any, *, keep: bool = False) -> None:
        results: list[Any] = [out] if type(out) is float else list(tensors(out))
        for result in results:
            slot = self._slots.put(result)
            entry.outputs.append(slot)
            entry.writes.add(self._slots.keys[slot])
        if results or keep or isinstance(entry.call, nn.Module):
            self._entries.append(entry)

    def _adopt(self, tensor: Tensor) -> None:
        """A constant is about to be written to: from here on it is a value, that starts as a copy of what it holds."""
        grad = tensor.requires_grad
        copy = tensor.detach().clone()
        entry = Entry("copy", lambda: copy.clone(), Const(((), {})), Modes.now(), None)
        if grad:
            entry.problem = "the script writes into a tensor that requires a gradient on the way to its loss"
        self._slots.write(tensor)
        self._finish(entry, tensor)

    def loss_scaled(self, scaled: Any, scale: Any) -> None:
        """A gradient scaler made `scaled` by multiplying with `scale`."""
        if isinstance(scaled, Tensor) and isinstance(scale, Tensor):
            self._depth += 1
            self._scales[id(scaled)] = scale.detach().clone()
            self._slots.hold(scaled)
            self._depth -= 1

    # What is made of it.

    def close(self, loss: Tensor) -> Plan:
        """Stop, and return what leads to `loss`. Raises NotMeasurable with the reason why there is nothing."""
        self.stop()
        try:
            return self._plan(loss)
        finally:
            self._entries, self._slots = [], Slots()

    def _plan(self, loss: Tensor) -> Plan:
        if self.failed:
            raise NotMeasurable(self.failed)
        if self._depth:
            raise NotMeasurable("backward was called inside of the model, or a call of the model did not return")
        slot = self._slots.of(loss)
        if slot is None:
            raise NotMeasurable("the loss was not computed from the model's output where it can be seen")
        if self._slots.unfollowed(loss, slot):
            raise NotMeasurable("the loss is made by a custom autograd function that could not be followed")
        return plan_of(
            self._entries,
            loss=slot,
            keys=self._slots.keys,
            reads=self._reads,
            roots=tuple(self._models.roots),
            before=tuple(self._models.before),
            loss_scale=self._scales.get(id(loss)),
        )
