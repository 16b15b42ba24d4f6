"""torch's pipelines: to learn what a stage receives and gives, each is run once, forward and backward, on what happens
to lie in memory. That is no training. And a microbatch goes backward through all stages: it is the last one's.

Source: torch 2.13, torch/distributed/pipelining/stage.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.seams import Seams

STAGES = "torch.distributed.pipelining.stage"
TRIES = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")  # the last in older ones


class Hears(Protocol):
    """Who hears, and is to hear nothing meanwhile; or to know that a gradient comes from another stage."""

    hearing: Hearing
    staged: int


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

    def staged(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            updates.staged += 1
            try:
                return original(*args, **kwargs)
            finally:
                updates.staged -= 1

        return run

    for name in TRIES:
        if hasattr(stage, name):
            seams.replace(stage, name, tried)
    if hasattr(module, "stage_backward"):
        seams.replace(module, "stage_backward", staged)
    return True
