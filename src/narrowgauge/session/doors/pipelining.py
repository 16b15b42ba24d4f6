"""torch's pipelines: to learn what a stage receives and gives, each is run once, forward and backward, on what happens
to lie in memory. That is no training. A microbatch goes backward through all stages: it is the last one's, whose loss
schedules divide in the end as they do its gradients. What goes forward is the batch in the first one only; and each may
number its layers from 0, so it matters which one runs.

Schedules without bubbles go back in two halves. The first asks the engine for gradients as `torch.autograd.grad` does,
and nobody is told of a backward pass; the second computes gradients again from those of the first, which were seen.

Source: torch 2.13, torch/distributed/pipelining/stage.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from narrowgauge.session.doors.backward import HearsBackward, backward
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.doors.within import Make, counted

STAGES = "torch.distributed.pipelining.stage"
TRIES = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")  # the last in older ones


class Hears(HearsBackward, Protocol):
    """Who hears, and is to hear nothing meanwhile; or to know which stage runs, and whose gradient is another one's."""

    hearing: Hearing
    staged: int

    def nothing_new(self) -> AbstractContextManager[None]:
        """Meanwhile what is multiplied was seen before."""
        ...

    def gradients_divided(self, by: float) -> None:
        """The gradients of all microbatches so far were divided."""


def follow(seams: Seams, updates: Hears) -> bool:
    """Hear nothing of such runs from now on; False if the program has not loaded pipelines yet."""
    module = sys.modules.get(STAGES)
    stage = getattr(module, "PipelineStage", None)
    if stage is None:
        return False

    def tried(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with updates.hearing.nothing():
                return original(*args, **kwargs)

        return run

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: Any, *args: Any, **kwargs: Any) -> Any:
            before, updates.hearing.stage = updates.hearing.stage, stage.stage_index
            try:
                return original(stage, *args, **kwargs)
            finally:
                updates.hearing.stage = before

        return run

    def scaled(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: Any, grad_scale_factor: int) -> Any:
            if stage.is_last:
                updates.gradients_divided(grad_scale_factor)
            return original(stage, grad_scale_factor)

        return run

    def halved(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            if gradients is not None:  # of another stage
                return original(outputs, gradients, *args, **kwargs)
            with backward(updates, tuple(outputs), plain=False):
                return original(outputs, gradients, *args, **kwargs)

        return run

    def again(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with updates.nothing_new():
                return original(*args, **kwargs)

        return run

    for name in TRIES:
        if hasattr(stage, name):
            seams.replace(stage, name, tried)
    base = getattr(module, "_PipelineStageBase", stage)  # of stages that torch cut out of a traced model as well
    for name, make in (("forward_maybe_with_nosync", forward), ("scale_grads", scaled)):
        if hasattr(base, name):
            seams.replace(base, name, make)
    passes: dict[str, Make] = {
        "stage_backward": counted(updates, "staged"),
        "stage_backward_input": halved,
        "stage_backward_weight": again,
    }
    for name, takes in passes.items():
        if hasattr(module, name):
            seams.replace(module, name, takes)
    return True
