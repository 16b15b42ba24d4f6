"""Layers that nobody converted: what FP8 would do to their tensors, or what they do themselves.

    recorded step     each product's input, weight and grad_output go through the recipe's quantizers, or through those
                      of the layer if it has its own; what they become is counted and thrown away
    other steps       no hook is there: nothing is paid

Which layers are known, and how, lies in `sites`. Products of torch's functions with a parameter are heard where no
layer tells of them. What is not seen is named in the run's notes.

A compiled graph hears no hooks that come later. So a recorded step runs as if nothing had been compiled, and the next
one uses the graphs again as they are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from narrowgauge.compute.kernels import choose
from narrowgauge.compute.nn.call import Call
from narrowgauge.compute.nn.conversion.eligible import DTYPES
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.observer import Observer, selects
from narrowgauge.compute.nn.operands import OperandRole, quantize_operand
from narrowgauge.compute.nn.scaling.clock import StepClock, inside_backward
from narrowgauge.compute.nn.scaling.scale_table import amax_ratio
from narrowgauge.compute.quant import PerTensor
from narrowgauge.compute.recipes import Recipe, by_name
from narrowgauge.session.sites import Census, Kind, Own, Part, Products, kind_of
from narrowgauge.session.sites.census import plain_name
from narrowgauge.session.sites.experts import quantize_experts
from narrowgauge.session.sites.part import Rule, Turn
from narrowgauge.session.tensors.sharded import Held, holders, is_distributed, local_of, used_of


@dataclass(frozen=True, eq=False)
class Layer:
    """A module of a known kind."""

    name: str
    known: ref[nn.Module]  # the program's, which may drop it
    kind: Kind
    observer: Observer

    @property
    def module(self) -> nn.Module | None:
        """The module; None once it is gone."""
        return self.known()


@dataclass(eq=False)
class Running:
    """A known module's call that has not returned."""

    layer: Layer
    heard: bool = False  # a product inside of it was shown in its name


class PlainSites:
    """The layers of a program's models that narrowgauge did not convert.

    Args:
        recipe: the name of the one that they are judged by, which keeps no state; without one, none is looked at.
        eager: whether a recorded step runs uncompiled.
        training: whether a training forward is running, asked at each layer's call.
        compiles: whether the program has compiled anything, asked at each recorded step.
        eagerly: makes what it compiled run uncompiled, meanwhile.
    """

    def __init__(
        self,
        recipe: str,
        *,
        eager: bool,
        training: Callable[[], bool],
        compiles: Callable[[], bool] = lambda: False,
        eagerly: Callable[[], AbstractContextManager[object]] = lambda: torch.compiler.set_stance("force_eager"),
    ) -> None:
        self._recipe = by_name(recipe) if recipe else None
        self._eager, self._training, self._compiles, self._eagerly = eager, training, compiles, eagerly
        self._clock = StepClock()
        self._layers: list[Layer] = []
        self._states: dict[tuple[int, str], LayerState] = {}  # by observer and name
        self._census = Census()
        self._products = Products(self._heard, self._failed)
        self._weights: set[tuple[int, str]] = set()  # seen in the open step
        self.copies: dict[str, int] = {}  # sites whose values other ranks hold as well, and the lowest that does
        self.meshes: dict[str, int] = {}  # sites of weights on a mesh, and its lowest rank
        self.dtype = ""  # of the first product's result
        self._steps = 0
        self._deaf = False  # products were not listened to
        self._open = ExitStack()
        self._running = threading.local()
        self._passed_over: Counter[str] = Counter()
        self._said: dict[str, None] = {}

    def add(self, model: nn.Module, observer: Observer) -> int:
        """Take in the layers of a model; how many of them are of a known kind."""
        if self._recipe is None:
            return 0
        self._census.add(model, observer)
        found = [
            Layer(plain_name(name), ref(module), kind, observer)
            for name, module in model.named_modules()
            if (kind := kind_of(module)) is not None
        ]
        self._layers += found
        return len(found)

    @property
    def notes(self) -> list[str]:
        """What was not looked at; empty if everything was."""
        notes = list(self._said)
        if self._passed_over:
            kinds = ", ".join(sorted(self._passed_over))
            notes.append(f"Some operands of layers are not recorded, because no quantizer takes them: {kinds}.")
        if self._deaf:
            notes.append(
                "Products outside of known layers are not recorded: the program compiles, and converted layers are "
                "watched in its graphs."
            )
        unseen = self._census.unseen() if self._steps else ""
        if unseen:
            notes.append(f"Not seen as a weight in any recorded step: {unseen}.")
        return notes

    def begin(self) -> None:
        """A recorded step begins."""
        self.end()
        self._weights.clear()
        self.copies.clear()
        self.meshes.clear()
        self._census.begin()
        if self._recipe is None:
            return
        self._steps += 1
        self._running = threading.local()
        self._layers = [layer for layer in self._layers if layer.module is not None]
        for layer in self._layers:
            module = layer.module
            if module is None:
                continue
            called = partial(self._called, layer)
            for handle in (
                module.register_forward_pre_hook(partial(self._begins, layer)),
                # First of all hooks: a sharded weight is whole here, and perhaps not after them.
                module.register_forward_hook(called, prepend=True, with_kwargs=True, always_call=True),
            ):
                self._open.callback(handle.remove)
        compiles = self._compiles()
        self._deaf = compiles and not self._eager  # a graph would be made anew for functions that come and go
        if not self._deaf:
            self._products.open()
            self._open.callback(self._products.close)
        if self._eager and compiles:
            self._open.enter_context(self._eagerly())

    def end(self) -> None:
        """It ended: no hook is left, and no parameter held."""
        self._open.close()
        self._census.end()

    def _calls(self) -> list[Running]:
        calls: list[Running] | None = getattr(self._running, "calls", None)
        if calls is None:
            calls = self._running.calls = []
        return calls

    def _begins(self, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._calls().append(Running(layer))

    def _called(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls()
        running = next((call for call in reversed(calls) if call.layer is layer), None)
        if running is None:  # a model that is one layer is followed from its second call on, and heard in its first
            return
        del calls[calls.index(running) :]
        if output is None or running.heard or torch._C._are_functorch_transforms_active():
            return
        try:
            for part in layer.kind.parts(module, args, kwargs, output):
                self._use(layer.name + part.suffix, layer.observer, part, self._held_by(module, part))
            if not layer.kind.whole:
                kind = type(module).__name__
                self._say(f"Layers of class {kind} are judged as linear layers of their input and gradient.")
        except Exception as error:
            self._failed(f"a call of {layer.name or type(module).__name__}", error)

    def _held_by(self, module: nn.Module, part: Part) -> Tensor | None:
        """Count a part's weight as seen; what it is between its uses."""
        name = next((n for n, p in module._parameters.items() if p is not None and p is part.w), None)
        owner = None if part.w is None or name is not None else self._census.owner(part.w)
        if owner is not None:
            return self._census.saw(owner.module, owner.name)
        self._census.saw(module, *part.holds)
        return self._census.kept(module, name or "")

    def _heard(self, part: Part, known: bool) -> None:
        """A product outside of layers that tell of themselves."""
        calls = self._calls()
        if part.w is None or any(call.layer.kind.whole for call in calls):
            return
        inside = calls[-1] if calls else None
        owner = self._census.owner(part.w) if known else None
        module = None if inside is None else inside.layer.module
        if inside is not None and module is not None and (owner is None or owner.module is module):
            own = getattr(module, "out_features", None), getattr(module, "in_features", None)
            if owner is not None or tuple(part.w.shape) == own:  # its weight, or what it computed of it
                inside.heard = True
                self._census.saw(module)
                kept = None if owner is None else self._census.kept(owner.module, owner.name)
                self._use(inside.layer.name, inside.layer.observer, part, kept)
                return
        if owner is not None:
            self._use(owner.site, owner.observer, part, self._census.saw(owner.module, owner.name))

    def _use(self, name: str, observer: Observer, part: Part, kept: Tensor | None) -> None:
        """One product, in the forward or in a recomputed one; `kept` is its weight as it is between its uses."""
        if part.hidden:
            self._say(part.hidden)
        some = next((t for t in (part.x, part.w, part.y) if t is not None), None)
        if self._recipe is None or some is None:
            return
        state = self._state(name, observer, self._recipe, some.device)
        x, w, y = part.x, part.w, part.y
        if y is not None and not self.dtype:
            self.dtype = str(y.dtype).removeprefix("torch.")
        own = _spread if part.own is not None and any(is_distributed(t) for t in (x, w, y)) else part.own
        held = Held(None) if x is None else local_of(x)
        learns = y is not None and y.requires_grad and torch.is_grad_enabled()
        if not inside_backward() and (learns or self._training()):  # a recomputed forward was seen when it ran first
            if x is not None:
                self._show(state, "input", part.x_rows, own, held)
            if w is not None and (id(observer), name) not in self._weights:
                self._weights.add((id(observer), name))
                self._show(state, "weight", part.w_rows, own, used_of(w, kept))
        if y is not None and y.requires_grad:
            same = _copied_output(w, held, y)
            turn = part.dy_rows  # the hook lives on y, and must not hold it
            y.register_hook(lambda dy: self._show(state, "grad_output", turn, own, local_of(dy), same))

    def _state(self, name: str, observer: Observer, recipe: Recipe, device: torch.device) -> LayerState:
        key = id(observer), name
        state = self._states.get(key)
        if state is None:
            backend, _ = choose(recipe, device)
            state = self._states[key] = LayerState(name, recipe, backend, self._clock, observer=observer)
        return state

    def _show(
        self, state: LayerState, role: OperandRole, turn: Turn, own: Own | None, held: Held, first: int | None = None
    ) -> None:
        """The one place where tensors go in."""
        try:
            x = held.tensor
            if x is None or type(x) is not Tensor or x.dtype not in DTYPES or x.layout is not torch.strided:
                self._passed_over[f"{role} {_kind(x)}"] += 1
                return
            if not x.numel() or not selects(state.observer, state.name, role):
                return
            first = held.first if held.first is not None else first
            site = f"{getattr(state.observer, 'prefix', '')}{state.name}:{role}"
            if first is not None:
                self.copies[site] = first
            if held.mesh is not None and role == "weight":
                self.meshes[site] = held.mesh
            if state.observer is not None and state.observer.wants(state.name):
                self._look(state, role, turn(x), own)
        except Exception as error:
            self._failed(f"{state.name}:{role}", error)

    def _look(self, state: LayerState, role: OperandRole, x: Tensor, own: Own | None) -> None:
        rule: Rule | str = Rule(state.recipe.uses(role)[0]) if own is None else own(role, x)
        if isinstance(rule, str):
            self._say(rule)
        elif x.numel() and not (x.dim() == 2 and _judged(state, role, x, rule)):
            with torch.no_grad(), torch.cuda.device_of(x), _plain_math(x.device.type):
                if own is not None:
                    _look_by(state, role, x, rule)
                elif x.dim() == 2:
                    quantize_operand(Call.begin(state, x.dtype, "write"), role, x, True, False)
                elif state.observer is not None:
                    state.observer.operand(state.name, role, x, quantize_experts(x, rule.operand))

    def _say(self, note: str) -> None:
        self._said.setdefault(note)

    def _failed(self, what: str, error: Exception) -> None:
        if not any(note.startswith("Watching ") for note in self._said):  # one of them says enough
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"Watching {what} failed, and its numbers are missing: {cause}. Training goes on.")


@contextmanager
def _plain_math(device_type: str) -> Iterator[None]:
    """Without autocast; `torch.autocast` would cost as much as counting a small tensor does."""
    was = torch.is_autocast_enabled(device_type)
    if was:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        if was:
            torch.set_autocast_enabled(device_type, True)


def _judged(state: LayerState, role: OperandRole, x_MK: Tensor, rule: Rule) -> bool:
    """Whether the observer counted what the rule would make of x: nothing had to be quantized for it."""
    judge = getattr(state.observer, "judge", None)
    return judge is not None and judge(state.name, role, x_MK, rule.operand, rule.given)


def _look_by(state: LayerState, role: OperandRole, x_MK: Tensor, rule: Rule) -> None:
    """Quantize as the layer does, and have it counted."""
    observer, (operand, given) = state.observer, rule
    if observer is None:
        return
    look = observer.look(state.name, role, x_MK, operand, turned=False) if state.backend.watches else None
    whole = operand.granularity == PerTensor()
    try:
        q, _, amax = state.backend.quantize_both(x_MK, operand, None, shared=whole, given=given, look=look)
    except Exception:
        if look is not None:
            look.failed = True  # it holds another step's numbers
        raise
    if look is None and q is not None:
        ratio = None if given is None or amax is None else amax_ratio(amax, given.scale, operand)
        observer.operand(state.name, role, x_MK, q, amax_ratio=ratio)


def _kind(x: Tensor | None) -> str:
    if x is None:
        return "sum that is not yet summed over the ranks"
    kind = f"{type(x).__name__} of {x.dtype}"
    return (kind if x.layout is torch.strided else f"{kind}, {x.layout}").replace("torch.", "")


def _spread(role: OperandRole, x: Tensor) -> str:
    return (
        "Layers that quantize by themselves are not recorded where their tensors are spread over ranks: their scales "
        "come from all parts."
    )


def _copied_output(weight: Tensor | None, x: Held, output: Tensor) -> int | None:
    """The lowest rank that has the same output, where the output itself does not say.

    A row-wise parallel layer, whose weight is cut along the contracted dimension, sums its output over the ranks: each
    has all of it, unless it was scattered again, and then there are fewer rows than in the input.
    """
    if weight is None or not is_distributed(weight) or is_distributed(output) or x.tensor is None:
        return None
    cut = [placement.is_shard(1) for placement in weight.placements]  # type: ignore[attr-defined]
    if not any(cut) or output.shape[:-1] != x.tensor.shape[:-1]:
        return None
    return holders(weight.device_mesh, cut)[0]  # type: ignore[attr-defined]
