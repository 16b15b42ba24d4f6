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

from narrowgauge.session.same_weights import function_modes
from narrowgauge.session.same_weights.ambient import Modes, Rng
from narrowgauge.session.same_weights.frozen_model import ModelState, all_modules
from narrowgauge.session.same_weights.plan import Entry, NotMeasurable, Plan, plan_of
from narrowgauge.session.same_weights.tree import Const, External, Node, Slot, freeze, tensors
from narrowgauge.session.tensors.storage import storage_of

# Reading a value on the host: what the script does with it afterwards cannot be seen.
_READS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
_IN_PLACE_OPERATORS = "add sub mul truediv floordiv mod pow and or xor matmul"
_IN_PLACE_DUNDERS = {f"__i{op}__" for op in _IN_PLACE_OPERATORS.split()}
_CANNOT = {
    "set_": "replaces a tensor's storage (Tensor.set_)",
    "resize_": "resizes a tensor in place",
}
# Attributes of tensors are read and written through these.
_GET_GRAD = vars(torch._C.TensorBase)["grad"].__get__
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
# Their names say that they write, but what they change is no value.
_NO_WRITES = {"requires_grad_", "share_memory_"}


class Tape(TorchFunctionMode):
    """Records from the first call of a model to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = ""
        self._entries: list[Entry] = []
        self._slots: dict[int, int] = {}  # id of a live object -> slot
        self._held: list[Any] = []  # keeps those ids unique
        self._keys: list[Any] = []  # slot -> storage
        self._grads: list[bool] = []  # slot -> whether it required a gradient when it was recorded
        self._written: set[Any] = set()  # storages of constants that the script wrote to
        self._reads: list[tuple[int, str]] = []
        self._roots: list[nn.Module] = []
        self._before: list[ModelState] = []
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
            self._add_root(whole or module)
            return
        function_modes.remove(self)
        self._add_root(whole or module)
        self._call = self._entry(type(module).__name__, module, args, kwargs, Rng.now())

    def module_ends(self, module: nn.Module, output: Any) -> None:
        """It returned."""
        self._depth -= 1
        if self._depth:
            return
        entry, self._call = self._call, None
        if entry is not None:
            self._finish(entry, output)
            self._collect_attributes(entry, module)
        if self._open:
            function_modes.insert(self)

    def _add_root(self, module: nn.Module) -> None:
        if any(module is known for root in self._roots for known in root.modules()):
            return
        self._roots = [root for root in self._roots if all(root is not m for m in module.modules())]
        self._roots.append(module)
        self._before.append(ModelState([module], own=True))

    def _collect_attributes(self, entry: Entry, module: nn.Module) -> None:
        """What the model keeps in attributes for the script to pick up (an auxiliary loss) is an output as well."""
        for part in all_modules([module]):
            for name, value in vars(part).items():
                found: list[tuple[Any, Any]]
                if isinstance(value, Tensor):
                    found = [(None, value)]
                elif type(value) in (list, tuple):
                    found = list(enumerate(value))
                elif type(value) is dict and name not in ("_parameters", "_buffers"):
                    found = list(value.items())
                else:
                    continue
                for key, item in found:
                    if isinstance(item, Tensor) and item.grad_fn is not None and id(item) not in self._slots:
                        slot = self._new_slot(item)
                        entry.attributes.append((slot, part, name, key))
                        entry.writes.add(self._keys[slot])

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
            self.fail(f"{name} could not be recorded ({type(error).__name__}: {error})")
            return None

    def _begin(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, opaque: bool) -> Entry | None:
        if func == _GET_GRAD:
            return None  # zeroing gradients before backward is no part of the loss
        inputs = tensors((args, kwargs))
        if func == _SET_DATA and any(id(t) in self._slots for t in inputs):
            self.fail("the script assigns to .data of a tensor on the way to its loss")
        grad = torch.is_grad_enabled()
        if not (any(self._concerns(t, grad) for t in inputs) or self._has_number(args)):
            return None
        target = _in_place_target(name, args, kwargs)
        if target is not None and id(target) not in self._slots:
            self._adopt(target)
        entry = self._entry(name, func, args, kwargs, Rng.now(whole=opaque))
        entry.problem = entry.problem or (
            _CANNOT.get(name, "") and f"the script {_CANNOT[name]} on the way to its loss"
        )
        if func is torch.autograd.grad:
            entry.problem = "the script calls torch.autograd.grad on the way to its loss"
        self._versions = [(t, t._version) for t in inputs if id(t) in self._slots and not t.is_inference()]
        self._target = target
        return entry

    def _concerns(self, tensor: Tensor, grad: bool) -> bool:
        """Whether a value that is computed from `tensor` may be another one in a replay."""
        if id(tensor) in self._slots or (grad and tensor.requires_grad):
            return True
        return bool(self._written) and _storage(tensor) in self._written

    def _has_number(self, args: Any) -> bool:
        return any(type(x) is float and id(x) in self._slots for x in args)

    def _end(self, entry: Entry, name: str, out: Any) -> None:
        if name in _READS:
            self._reads.append((len(self._entries), name))
        if entry.rng is not None and entry.rng.python is None and entry.rng.same(Rng.now(whole=False)):
            entry.rng = None
        mutated = [t for t, version in self._versions if t._version != version]
        if self._target is not None and all(t is not self._target for t in mutated):
            mutated.append(self._target)
        for tensor in mutated:
            slot = self._slots[id(tensor)]
            entry.writes.add(self._keys[slot])
            self._grads[slot] = tensor.requires_grad
        self._finish(entry, out, keep=bool(mutated))

    def _entry(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, rng: Rng | None) -> Entry:
        entry = Entry(name, call, Const(None), Modes.now(), rng)

        def leaf(x: Tensor | float) -> Node:
            slot = self._slots.get(id(x))
            if slot is None:
                return Const(x) if isinstance(x, float) else self._external(x, entry)
            if isinstance(x, Tensor) and x.requires_grad and not self._grads[slot]:
                entry.problem = "the loss goes through a custom autograd function that could not be followed"
            entry.reads.add(self._keys[slot])
            return Slot(slot)

        entry.args = freeze((tuple(args), dict(kwargs)), leaf)
        return entry

    def _external(self, tensor: Tensor, entry: Entry) -> External:
        if tensor.grad_fn is not None:
            entry.problem = "the loss depends on a tensor with gradients that was computed where it cannot be seen"
        if _storage(tensor) in self._written:
            entry.problem = "the loss depends on a tensor that shares memory with one that the script wrote to"
        return External(tensor, -1 if tensor.is_inference() else tensor._version)

    def _finish(self, entry: Entry, out: Any, *, keep: bool = False) -> None:
        results: list[Any] = [out] if type(out) is float else list(tensors(out))
        for result in results:
            slot = self._new_slot(result)
            entry.outputs.append(slot)
            entry.writes.add(self._keys[slot])
        if results or keep or isinstance(entry.call, nn.Module):
            self._entries.append(entry)

    def _new_slot(self, value: Any) -> int:
        slot = self._slots.get(id(value))
        if slot is None:
            slot = self._slots[id(value)] = len(self._keys)
            self._held.append(value)
            self._keys.append(_storage(value) if isinstance(value, Tensor) else ("number", id(value)))
            self._grads.append(False)
        self._grads[slot] = isinstance(value, Tensor) and value.requires_grad
        return slot

    def _adopt(self, tensor: Tensor) -> None:
        """A constant is about to be written to: from here on it is a value, that starts as a copy of what it holds."""
        grad = tensor.requires_grad
        copy = tensor.detach().clone()
        entry = Entry("copy", lambda: copy.clone(), Const(((), {})), Modes.now(), None)
        if grad:
            entry.problem = "the script writes into a tensor that requires a gradient on the way to its loss"
        self._written.add(_storage(tensor))
        self._finish(entry, tensor)

    def loss_scaled(self, scaled: Any, scale: Any) -> None:
        """A gradient scaler made `scaled` by multiplying with `scale`."""
        if isinstance(scaled, Tensor) and isinstance(scale, Tensor):
            self._depth += 1
            self._scales[id(scaled)] = scale.detach().clone()
            self._held.append(scaled)
            self._depth -= 1

    # What is made of it.

    def close(self, loss: Tensor) -> Plan:
        """Stop, and return what leads to `loss`. Raises NotMeasurable with the reason why there is nothing."""
        self.stop()
        try:
            return self._plan(loss)
        finally:
            self._entries, self._slots, self._held = [], {}, []

    def _plan(self, loss: Tensor) -> Plan:
        if self.failed:
            raise NotMeasurable(self.failed)
        if self._depth:
            raise NotMeasurable("backward was called inside of the model, or a call of the model did not return")
        slot = self._slots.get(id(loss))
        if slot is None:
            raise NotMeasurable("the loss was not computed from the model's output where it can be seen")
        if loss.requires_grad and not self._grads[slot]:
            raise NotMeasurable("the loss is made by a custom autograd function that could not be followed")
        return plan_of(
            self._entries,
            loss=slot,
            keys=self._keys,
            reads=self._reads,
            roots=tuple(self._roots),
            before=tuple(self._before),
            loss_scale=self._scales.get(id(loss)),
        )


def _in_place_target(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a call will write to, if its name says that it writes."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]  # type: ignore[no-any-return]
    by_name = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    by_name = by_name or name in _IN_PLACE_DUNDERS or name == "__setitem__"
    if (by_name or kwargs.get("inplace") is True) and args and isinstance(args[0], Tensor):
        return args[0]
    return None


def _storage(tensor: Tensor) -> Any:
    storage = storage_of(tensor)
    return ("tensor", id(tensor)) if storage is None else storage._cdata  # without one: alone with itself
