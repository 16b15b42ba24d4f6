"""What Megatron-Core's schedules and optimizers do that torch's own doors do not show.

    custom_backward(output, grad)       the C++ engine itself, so that an output may be empty by then; with a `grad` the
                                        output is what a later stage of the pipeline went on with, and no loss
    deallocate_output_tensor(output)    empties it, a loss as well: what it was is kept until its backward
    optimizer.scale_loss(loss)          loss · scale: the scale is taken off again
    optimizer.step()                    clips by itself, by the norm of all ranks' gradients; or skips, if one is not
                                        finite; says both. Without a limit to clip by some say that the norm is 0

Its functions and classes are changed in place, where a program has loaded them. What one of its versions does not have
is let be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from narrowgauge.session.doors.backward import HearsBackward, backward
from narrowgauge.session.doors.engines import HearsEngineSteps, engine_step
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.doors.updating import Told
from narrowgauge.session.tensors.shares import stage_here

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
SCALES = (_OPTIMIZER, "MegatronOptimizer")
STEPS = (
    (_OPTIMIZER, "MixedPrecisionOptimizer"),
    (_OPTIMIZER, "FP32Optimizer"),
    (_OPTIMIZER, "ChainedOptimizer"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"),
    ("megatron.core.optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer"),
)


class HearsMegatron(HearsBackward, Protocol):
    """Hears of its schedules and optimizers."""

    def loss_multiplied(self, before: Any, after: Any, scale: Callable[[], float | Tensor | None]) -> None:
        """A loss was multiplied by a scale, which is None where it is none that changes."""

    def pipelined(self) -> None:
        """A stage of a pipeline is trained."""

    @property
    def engines(self) -> HearsEngineSteps:
        """Who hears of its optimizers' steps."""


class Megatron:
    """Its doors, for one session."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ReferenceType[Tensor], Tensor]] = {}  # losses before they were emptied

    def follow_schedules(self, seams: Seams, updates: HearsMegatron) -> bool:
        """Hear the backward passes of its schedules from now on; False if the program has not loaded them yet."""
        schedules = sys.modules.get(SCHEDULES)
        if not hasattr(schedules, "get_forward_backward_func"):  # or not all of them
            return False

        def engine(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(output: Any, grad_output: Any = None) -> Any:
                last = grad_output is None  # of the pipeline's stages
                if not last or (not seams.resting and stage_here() is not None):
                    updates.pipelined()
                with backward(updates, self._loss(output) if last else None, plain=last, alone=seams.resting):
                    return original(output, grad_output)

            return run

        def deallocate(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(out: Any, *args: Any, **kwargs: Any) -> Any:
                self._keep(out)
                return original(out, *args, **kwargs)

            return run

        _replace(seams, schedules, "custom_backward", engine)
        _replace(seams, schedules, "deallocate_output_tensor", deallocate)
        return True

    def follow_optimizers(self, seams: Seams, updates: HearsMegatron) -> bool:
        """Hear what its optimizers do from now on; False if the program has not loaded them yet."""
        if _class(*SCALES) is None:
            return False

        def scale(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(optimizer: Any, loss: Any) -> Any:
                scaled = original(optimizer, loss)
                updates.loss_multiplied(self._loss(loss), scaled, lambda: _scale(optimizer))
                return scaled

            return run

        def step(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if not seams.resting and stage_here() is not None:
                    updates.pipelined()
                step = partial(original, optimizer, *args, **kwargs)
                return engine_step(updates.engines, step, lambda out: _told(optimizer, out))

            return run

        _replace(seams, _class(*SCALES), "scale_loss", scale)
        for module, name in STEPS:
            owner = _class(module, name)
            if "step" in vars(owner or object):  # its own, and not that of a class above it
                _replace(seams, owner, "step", step)
        return True

    def _keep(self, output: Any) -> None:
        if isinstance(output, Tensor) and output.numel() == 1:
            self._kept = {at: kept for at, kept in self._kept.items() if kept[0]() is not None}
            self._kept[id(output)] = ref(output), output.detach().clone()

    def _loss(self, output: Any) -> Any:
        """The output as it was before it was emptied."""
        known, value = self._kept.get(id(output), (None, None))
        return output if known is None or known() is not output else value


def _replace(seams: Seams, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if hasattr(owner, name):
        seams.replace(owner, name, make)


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _told(optimizer: Any, out: Any) -> Told:
    """From (successful, norm, zeros) that it returned."""
    held = [x for each in _each(optimizer) if (x := getattr(each, "optimizer", None)) is not None]
    if not isinstance(out, tuple) or len(out) < 2:
        return None, False, held
    done, norm = out[0], out[1]
    return norm if isinstance(norm, Tensor) or norm else None, not done, held


def _each(optimizer: Any) -> list[Any]:
    """Those in a chain, which may hold another; or the one itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [each for inner in chained for each in _each(inner)]


def _scale(optimizer: Any) -> float | Tensor | None:
    """The scale of the loss, None where it is 1 for ever."""
    scaler = next((getattr(each, "grad_scaler", None) for each in _each(optimizer)), None)
    return None if scaler is None else torch.as_tensor(scaler.scale).detach().clone()
