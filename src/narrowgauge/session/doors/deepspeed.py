"""What DeepSpeed's engine does around the optimizer that it holds, which torch's own doors do not show.

    making it              an optimizer may step once, on zero gradients, to have its state: no step of training
    engine.backward(loss)  loss / microbatches · scale, then torch's backward: the scale is taken off again
    engine.step()          at the end of accumulation: the norm of all ranks' gradients, from before it clips them; then
                           the optimizer, once for each of its groups, or of their parts; or nothing, if a gradient
                           is not finite

Its classes are changed in place, where a program has loaded them. What one of its versions does not have is let be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from narrowgauge.session.doors.engines import HearsEngineSteps, engine_step
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.doors.updating import Told
from narrowgauge.session.doors.within import Make, counted

ENGINE = "deepspeed.runtime.engine"
PIPELINE = "deepspeed.runtime.pipe.engine"
PREPARES = (
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer"),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
)


class HearsEngines(Protocol):
    """Hears of an engine."""

    prepares: int
    staged: int

    @property
    def engines(self) -> HearsEngineSteps:
        """Who hears of its steps."""

    def gradients_clipped(self, norm: Any, order: float) -> None:
        """Gradients were clipped; `norm`, of that order, is theirs from before."""

    def loss_multiplied(self, before: Any, after: Any, scale: Callable[[], float | None]) -> None:
        """A loss was multiplied by a scale, which is None where it is none that changes."""

    def pipelined(self) -> None:
        """An engine goes through stages of a pipeline."""


def follow(seams: Seams, updates: HearsEngines) -> bool:
    """Hear DeepSpeed's engines from now on; False if the program has not loaded them yet."""
    engine = getattr(sys.modules.get(ENGINE), "DeepSpeedEngine", None)
    if engine is None:
        return False

    def clip(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            updates.gradients_clipped(norm, float(kwargs.get("norm_type", args[2] if len(args) > 2 else 2.0)))
            return norm

        return run

    def scale(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, value: Any) -> Any:
            scaled = original(self, value)
            updates.loss_multiplied(value, scaled, lambda: float(self.loss_scale) if self.needs_scaler() else None)
            return scaled

        return run

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = getattr(self, "skipped_steps", 0)
            step = partial(original, self, *args, **kwargs)
            return engine_step(updates.engines, step, lambda _: _told(self, before))

        return run

    def stages(original: Callable[..., Any]) -> Callable[..., Any]:
        inside = counted(updates, "staged")(original)

        def run(*args: Any, **kwargs: Any) -> Any:
            updates.pipelined()
            return inside(*args, **kwargs)

        return run

    places: list[tuple[str, str, str, Make]] = [
        (ENGINE, "DeepSpeedEngine", "_take_model_step", step),
        ("deepspeed.runtime.base_optimizer", "ZeROOptimizer", "scale_if_loss", scale),
        (PIPELINE, "PipelineEngine", "_exec_schedule", stages),  # it holds its functions by pass
        *((module, name, "initialize_optimizer_states", counted(updates, "prepares")) for module, name in PREPARES),
    ]
    for module, name, function, make in places:
        owner = getattr(sys.modules.get(module), name, None)
        if hasattr(owner, function):
            seams.replace(owner, function, make)
    if hasattr(sys.modules[ENGINE], "clip_grad_norm_"):
        seams.replace(sys.modules[ENGINE], "clip_grad_norm_", clip, rests=True)
    return True


def made_with(objects: Iterable[Any]) -> dict[int, list[Tensor]]:
    """Of engines among the objects: the id of the optimizer that each holds -> the parameters that it was made with."""
    kind = getattr(sys.modules.get(ENGINE), "DeepSpeedEngine", None)
    engines = () if kind is None else (x for x in objects if issubclass(type(x), kind))
    held = ((getattr(engine, "basic_optimizer", None), engine.module) for engine in engines)
    return {id(o): [p for p in module.parameters() if p.requires_grad] for o, module in held if o is not None}


def _told(engine: Any, before: int) -> Told:
    held = getattr(engine, "basic_optimizer", None)
    return _norm(engine.get_global_grad_norm()), engine.skipped_steps > before, [] if held is None else [held]


def _norm(norm: Any) -> float | Tensor | None:
    """A norm; NaN where DeepSpeed says -1, which is how it says that it is none."""
    if isinstance(norm, Tensor):
        norm = norm.detach().reshape(())
        return torch.where(norm < 0, torch.nan, norm)
    return None if norm is None else float(norm) if norm >= 0 else float("nan")
