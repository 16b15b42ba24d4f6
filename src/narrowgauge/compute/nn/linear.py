"""Fp8Linear: an nn.Linear whose three gemms run in FP8, made by changing the module's class and nothing else.

Parameters, hooks, aliases, optimizer state and the RNG stay as they were: no module is built, no parameter
copied. What the layer needs to know hangs on it as one plain attribute, which no state_dict sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.compute.kernels import Backend
from narrowgauge.compute.nn.compiled import compiled_linear
from narrowgauge.compute.nn.function import expected_dtype, fp8_linear
from narrowgauge.compute.nn.gathered import gathered_linear
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.nested import product_of_pieces
from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.nn.parallel.parts import product_in_parts
from narrowgauge.compute.nn.parallel.placements import is_distributed
from narrowgauge.compute.nn.parallel.wrapped import class_of, exchange
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.nn.scaling.state_io import load_from, save_into
from narrowgauge.compute.nn.tracing.marks import constant, exporting, not_compiled
from narrowgauge.compute.recipes import Recipe
from narrowgauge.errors import ConversionError

_TRANSFORMED = (
    "a converted layer was called inside a transform of torch.func (vmap, grad, jvp, ...), which would see no "
    "derivative of its FP8 products: they have the one that backward gives. Use torch.autograd, or call "
    "narrowgauge.revert(model)."
)
_EXPORTED = (
    "a converted layer cannot be exported: its scales and its watching live in this process, and an exported program "
    "would look for them elsewhere. Export the plain model: narrowgauge.revert(model) first."
)
_SPARSE = (
    "the converted layer {name!r} was given a sparse tensor ({layout}), and FP8 products are those of dense ones. Keep "
    "the layer high (skip=[{name!r}], or `skip` of [convert] in a settings file, --config), or give it x.to_dense()."
)


# Below a graph break a compiler would look into it, and compile its kernels anew in its own way: ten times slower.
_eager_linear: Callable[..., Tensor] = not_compiled(fp8_linear)
_gathered_linear: Callable[..., Tensor] = not_compiled(gathered_linear)


# Asked while a graph is traced, and not traced: one torch's compiler stops there.
@constant
def _transforming() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 gemms; x [..., K] to [..., N]. Made by `adopt`, never constructed."""

    _fp8: LayerState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConversionError(
            "Fp8Linear is not constructed: building one would draw random numbers and shift every seed after "
            "it. Build an nn.Linear and convert it: narrowgauge.convert(model, recipe=...)."
        )

    @staticmethod
    def adopt(
        module: nn.Linear,
        *,
        name: str,
        recipe: Recipe,
        backend: Backend,
        table: ScaleTable | None = None,
        clock: StepClock,
    ) -> LayerState:
        """Turn `module` into an Fp8Linear in place and return its state; `name` is its address in reports and
        errors.

        `table` and `clock` are the model's, shared by its layers; a recipe without state needs no table.
        Raises ConversionError for anything but a plain nn.Linear, and for a delayed or static recipe without
        a table.
        """
        if class_of(module) is not nn.Linear:
            raise ConversionError(
                f"{name!r} is a {type(module).__name__}, and only a plain nn.Linear can be converted in "
                "place; leave it out (skip=...), or revert it first."
            )
        if recipe.state == "none":
            table = None
        elif table is None:
            raise ConversionError(f"recipe {recipe.name!r} keeps state and {name!r} was given no ScaleTable for it.")
        row = table.add(name, recipe) if table is not None else None
        state = LayerState(name=name, recipe=recipe, backend=backend, clock=clock, table=table, row=row)
        clock.follow(module)
        state.subscribe()
        state.move(module.weight.device)
        exchange(module, Fp8Linear)
        vars(module)["_fp8"] = state
        state.lies(module.weight)
        return state

    @staticmethod
    def release(module: nn.Module) -> None:
        """Turn `module` back into the nn.Linear that it was; ConversionError if it is no Fp8Linear."""
        if not isinstance(module, Fp8Linear):
            raise ConversionError(f"a {type(module).__name__} was never converted, so it cannot be released.")
        del module._fp8
        exchange(module, nn.Linear)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear's own name)
        """Return input [..., K] times weight [N, K] transposed, plus bias, [..., N]."""
        if _transforming():
            raise ConversionError(_TRANSFORMED)
        weight = self.weight
        if input.is_nested:
            return product_of_pieces(partial(Fp8Linear.forward, self), input, weight, self.bias)
        if input.layout is not torch.strided:
            raise ConversionError(_SPARSE.format(name=self._fp8.name, layout=input.layout))
        if is_distributed(weight):
            self._fp8.lies(weight)
            y, everywhere = product_in_parts(self._product, input, weight, self.bias)
            if self._fp8.observer is not None and not torch.compiler.is_compiling():
                self._fp8.note_copies(weight, everywhere)
            return y
        return self._product(input, weight, self.bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of plain tensors."""
        state = self._fp8
        if torch.compiler.is_compiling():
            if exporting():
                raise ConversionError(_EXPORTED)
            return compiled_linear(x, weight, bias, state, expected_dtype(x, weight, bias))
        if state.gathers(weight):
            state.kept_weight.lasting = False
            if state.observer is not None and not is_distributed(self.weight):
                state.note_copies(self.weight)
            if torch.is_grad_enabled() and not state.keeps_high:
                return _gathered_linear(x, weight, bias, state)  # which counts the call
        state.calls += 1
        return _eager_linear(x, weight, bias, state)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight" and "_fp8" in vars(self):
            self._fp8.lies(value)  # so FSDP2 tells, which exchanges the weight around each use

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._fp8.clock.follow(self)  # a copy, or a module that was unpickled
        self._fp8.move(self.weight.device)
        self._fp8.lies(self.weight)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        module = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._fp8.move(self.weight.device)
        return module

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_into(destination, prefix, self._fp8)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        self._fp8.kept_weight.forget()
        load_from(self._fp8, local_metadata, f"{prefix}weight" in state_dict, errors=lists[-1])

    def extra_repr(self) -> str:
        """The shape, the recipe and the backend."""
        return f"{super().extra_repr()}, recipe={self._fp8.recipe.name}, backend={self._fp8.backend.name}"


def set_observer(model: nn.Module, observer: Observer | None) -> int:
    """Attach `observer` to every Fp8Linear of `model` (None detaches); return how many there are."""
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    for layer in layers:
        layer._fp8.observer = observer
    return len(layers)


def clock_of(model: nn.Module) -> StepClock | None:
    """Return the clock of the first Fp8Linear of `model`, None if it has none."""
    return next((module._fp8.clock for module in model.modules() if isinstance(module, Fp8Linear)), None)
