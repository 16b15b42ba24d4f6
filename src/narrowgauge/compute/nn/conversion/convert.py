"""Turn a model's linear layers to FP8 in place, and back.

    convert:  module.__class__ = Fp8Linear        revert:  module.__class__ = nn.Linear

Only the class changes: parameters, buffers, hooks, aliases, training flags and the random state stay as they
were, so an optimizer made before or after works alike, and `state_dict` keeps the keys of the plain model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from narrowgauge.compute.nn.conversion.plan import Plan, Request, make_plans, nothing_to_convert, resolve
from narrowgauge.compute.nn.conversion.report import ConversionReport, Row
from narrowgauge.compute.nn.conversion.rule_checks import some
from narrowgauge.compute.nn.conversion.rules import O2, Rule
from narrowgauge.compute.nn.conversion.speed_map import SlowLayers, SpeedMap
from narrowgauge.compute.nn.conversion.structure import Layer, clean, is_wrapper, survey
from narrowgauge.compute.nn.conversion.switches import Switch
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.parallel.wrapped import class_of
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.nn.scaling.resume_warnings import steps_taken, warn_fresh_after
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.nn.scaling.state_io import restore_to, take_pending
from narrowgauge.compute.nn.tracing.in_graph import CODES, REMADE
from narrowgauge.compute.recipes import Recipe
from narrowgauge.errors import ConversionError

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    recipe: Recipe | str,
    rules: Sequence[Rule] | None = None,
    skip: Sequence[str] | str = (),
    first: int = 0,
    last: int = 0,
    backend: str | None = None,
    only: Sequence[str] | str | None = None,
    skip_slow: bool | SpeedMap = False,
    tokens: int | None = None,
    save_codes: bool = False,
    high: Sequence[Switch | Mapping[str, Any]] = (),
    reduce_amax: bool | Any = True,
    beside: bool = False,
    strict: bool = True,
) -> tuple[Model, ConversionReport]:
    """Convert the linear layers of `model` to FP8 in place; return the same model and what was done.

    `rules` is one list, first match wins, no match stays high (default: `rules.O2`; see `narrowgauge.rules`).
    `skip` and `only` are globs on module names (a name covers everything below it); `first` and `last` keep
    that many repeated blocks high at either end. `backend` names a kernel backend; left out, the best one
    that can is taken.

    `skip_slow` keeps high every layer that was measured to be slower in FP8 on this kind of GPU (see `speed_map`), at
    `tokens` rows of input, 8192 unless said otherwise; give a `SpeedMap` to use another one. Where no map holds, the
    report has a line that says so, and nothing is kept high for its speed.

    `save_codes` lets a compiled forward save FP8 codes of every input, one byte per element: 1 to 2% faster than
    leaving to the compiler what it saves (the default), which takes less memory. Not compiled, codes are always saved.

    `high` keeps single products or operands of converted layers high: mappings with `sites` (globs), `gemms` ("fprop",
    "dgrad", "wgrad"), `roles` ("input", "weight", "grad_output") and `keep` ("high", or "bf16_gemm": quantized, and
    multiplied in the layer's own dtype), all optional; see docs/convert.md.

    `reduce_amax` is for scales that outlive a step (delayed, static), on several ranks: True makes them from the
    largest amax of all ranks that are known to train the layer together (DistributedDataParallel, FSDP2, DTensors), by
    one collective per step; False from each rank's own. A `ProcessGroup` says who they are where nothing else does:
    all its ranks must step together.

    `beside` is for a model that shares layers with one that was converted before (two towers, actor and critic): those
    stay as they are, and are not in the report; rules and globs may name them. With `strict=False` a model without an
    eligible layer is no error: its report says why each one stays high.

    Raises ConversionError when a rule, `skip`, `only` or `high` matches nothing, when no layer is eligible, and when
    the model is already converted (call `revert` first: converting over it would drop its scaling state; or see
    `beside`), for `tokens` below 1 or without `skip_slow`, and for a `model`, `high` or `reduce_amax` that is no such
    thing; RecipeError for an unknown recipe. After an error the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"convert got a {type(model).__name__} as the model; expected a torch.nn.Module.")
    if isinstance(high, Mapping | str):
        raise ConversionError(f"high is a {type(high).__name__}; expected a list of mappings: high=[{{...}}].")
    request = Request(
        recipe=resolve(recipe),
        rules=tuple(O2 if rules is None else rules),
        skip=_patterns(skip),
        first=first,
        last=last,
        backend=backend,
        only=None if only is None else _patterns(only),
        high=tuple(map(Switch.of, high)),
    )
    if tokens is not None and not skip_slow:
        raise ConversionError(f"tokens={tokens} is only used by skip_slow; pass skip_slow=True, or leave tokens out.")
    if not isinstance(reduce_amax, bool) and not (dist.is_available() and isinstance(reduce_amax, dist.ProcessGroup)):
        raise ConversionError(
            f"reduce_amax is a {type(reduce_amax).__name__}; expected True, False, or a torch.distributed.ProcessGroup "
            "that this rank is in."
        )
    slow = SlowLayers(skip_slow, tokens) if skip_slow else None
    layers = survey(model)
    if not beside:
        _refuse_converted(layers)
    wrapped = is_wrapper(model)
    modules = [clean(name, wrapped=wrapped) for name, _ in model.named_modules(remove_duplicate=False)]
    request.check(layers, modules)
    plans = make_plans(request, [layer for layer in layers if not isinstance(layer.module, Fp8Linear)], slow)
    if strict and not any(plan.recipe for plan in plans):
        raise nothing_to_convert(model, plans)
    rows = _adopt(model, plans, CODES if save_codes else REMADE, reduce_amax)
    backends = {plan.recipe.name: plan for plan in reversed(plans) if plan.recipe}
    report = ConversionReport(
        model=type(model).__name__,
        recipe=request.recipe.name,
        rows=tuple(rows),
        backends=tuple((n, p.backend.name, p.why_backend) for n, p in sorted(backends.items()) if p.backend),
        notes=(*_notes(model), *_switched_notes(plans), *(slow.notes() if slow else ())),
    )
    return model, report


def revert(model: Model) -> Model:
    """Undo `convert` in place and return the model: every layer is a plain `nn.Linear` again, bit for bit.

    Scaling state is dropped (save it with `scaling_state` before). Raises ConversionError if nothing is
    converted, or if a converted layer's class was changed again since; then nothing is reverted.
    """
    converted = {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    if not converted:
        raise ConversionError(f"nothing to revert: {type(model).__name__} has no converted layer.")
    for name, module in converted.items():
        if class_of(module) is not Fp8Linear:
            raise ConversionError(
                f"{name!r} became a {type(module).__name__} after its conversion (a parametrization "
                "does that); undo this first, or revert before it is done."
            )
    for module in converted.values():
        Fp8Linear.release(module)
    return model


def _patterns(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _refuse_converted(layers: Sequence[Layer]) -> None:
    converted = {layer.name: layer.module._fp8 for layer in layers if isinstance(layer.module, Fp8Linear)}
    if converted:
        recipe = next(iter(converted.values())).recipe.name
        raise ConversionError(
            f"the model is already converted ({len(converted)} layers, to {recipe!r}: "
            f"{some(list(converted), 3)}); call narrowgauge.revert(model) first. "
            "Converting over it would drop its scaling state."
        )


def _adopt(model: nn.Module, plans: Sequence[Plan], saves: int, reduce_amax: Any) -> list[Row]:
    device = next((plan.layer.weight.device for plan in plans if plan.recipe), None)
    if device is None:
        return [_row(plan, None) for plan in plans]
    table, clock = ScaleTable(device, reduce_amax), StepClock()
    try:
        states = [_adopt_one(plan, table, clock) for plan in plans]
        for plan in plans:
            if plan.recipe is not None:
                table.check_scales(plan.recipe)
    except BaseException:  # a refused scale, or a loaded state that does not fit: leave the model as it was
        for plan in plans:
            if isinstance(plan.layer.module, Fp8Linear):
                Fp8Linear.release(plan.layer.module)
        raise
    for state in states:
        if state is not None:
            state.save(saves)
    clock.follow(model)  # all of it: converted layers may be frozen, and only adapters or norms trained
    if table.sites:
        clock.on_first_step(partial(_check_resumed, table))
    return [_row(plan, state) for plan, state in zip(plans, states, strict=True)]


def _adopt_one(plan: Plan, table: ScaleTable, clock: StepClock) -> LayerState | None:
    module = plan.layer.module
    if plan.recipe is None or plan.backend is None or not isinstance(module, nn.Linear):
        return None
    state = Fp8Linear.adopt(
        module, name=plan.layer.name, recipe=plan.recipe, backend=plan.backend, table=table, clock=clock
    )
    loaded = take_pending(module)
    if loaded is not None:
        restore_to(state, loaded)
    return state


def _check_resumed(table: ScaleTable, optimizer: Optimizer) -> None:
    before = steps_taken(optimizer) - 1  # it has just made the first one with these scales
    if table.steps == 0 and before > 0:
        warn_fresh_after(before)


def _row(plan: Plan, state: LayerState | None) -> Row:
    layer = plan.layer
    return Row(
        name=layer.name,
        shape=layer.shape,
        recipe=plan.recipe.name if plan.recipe else None,
        reason=plan.reason,
        backend=plan.backend.name if plan.backend else None,
        aliases=layer.aliases,
        shared_with=(*layer.shared_with, *(name for name in layer.tied if name not in layer.shared_with)),
        state=state,
        fp8_gemms=3 if plan.recipe is None or plan.recipe.fake else plan.recipe.fp8_gemms,
        block=layer.block,
        blocks=layer.blocks,
    )


def _switched_notes(plans: Sequence[Plan]) -> tuple[str, ...]:
    """What it costs that some products stay high."""
    count = sum(plan.recipe is not None and plan.recipe.keeps_high for plan in plans)
    if not count:
        return ()
    return (
        f"note: {count} converted layers keep a product or an operand high. They save x and w for the backward pass in "
        "high precision instead of codes of x, and quantize again there what is still multiplied in FP8.",
    )


def _notes(model: nn.Module) -> tuple[str, ...]:
    """What the table cannot show."""
    if not any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        return ()
    return (
        "note: nn.TransformerEncoderLayer has a fused path for evaluation without grad, which reads the "
        "weights directly and so runs in high precision.",
    )
