"""What a program calls: modules, reentrant checkpoints, data loaders.

called  torch's global forward pre-hook     the outermost call of a module that owns trained parameters
kept    torch's reentrant checkpoints       what runs without gradients now, and with them later
loaded  torch.utils.data's iterators        how long the program waits for a batch
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data.dataloader import _BaseDataLoaderIter

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.optimizer_steps import OURS
from narrowgauge.session.doors.seams import Seams


class Expects(Protocol):
    """Expects calls of a model while steps are left alone."""

    expected: Callable[[], nn.Module | None]  # the one that was called last
    hook: Callable[[nn.Module, tuple[Any, ...]], None] | None  # that hears of all modules; None if nobody listens


class HearsModules(Protocol):
    """Hears of modules."""

    @property
    def alone(self) -> Expects:
        """Who hears of models while steps are left alone."""

    def module_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is about to run its forward."""

    def known(self, module: nn.Module) -> bool:
        """Whether its own hooks tell of it, or it cannot be trained."""


class HearsCheckpoints(Protocol):
    """Hears of what is run once more."""

    def checkpoint_runs(self, runs: bool) -> None:
        """A reentrant checkpoint's first forward begins, or has ended."""


class HearsLoads(Protocol):
    """Hears of batches."""

    def batch_loaded(self, seconds: float, iterator: Any, *, last: bool = False) -> None:
        """A data loader's iterator gave a batch after so long, or had no more: the one before was the `last`."""


def follow(
    seams: Seams, modules: HearsModules, checkpoints: HearsCheckpoints, loads: HearsLoads
) -> Callable[[bool], None]:
    """Tell these until the seams are closed.

    Returns what has modules' calls heard, or none of them: where there is a hook for all of them, torch takes a longer
    way to each.
    """

    alone = modules.alone

    @passed_over
    def called(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_dynamo_compiling():  # while a graph is traced nothing is called yet
            return
        if seams.resting:
            if module is alone.expected():
                return
            if torch.is_grad_enabled() and modules.known(module):  # evaluations are heard always
                return
        modules.module_called(module, args)

    def hear(heard: bool) -> None:
        hooks = nn.modules.module._global_forward_pre_hooks
        if not heard and OURS in hooks and hooks[OURS] in (called, alone.hook):
            del hooks[OURS]
        elif heard and seams.telling:
            hooks[OURS] = called

    def checkpointed(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or inside_backward() or torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            checkpoints.checkpoint_runs(True)
            try:
                return original(*args, **kwargs)
            finally:
                checkpoints.checkpoint_runs(False)

        return run

    def next_batch(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any) -> Any:
            if not seams.telling:
                return original(self)
            began, last = time.perf_counter(), False
            try:
                return original(self)
            except StopIteration:
                last = True
                raise
            finally:
                loads.batch_loaded(time.perf_counter() - began, self, last=last)

        return run

    seams.replace(CheckpointFunction, "apply", checkpointed)
    seams.replace(_BaseDataLoaderIter, "__next__", next_batch, alone=True)  # a dataset's errors pass here

    def closed() -> None:
        alone.hook = None
        hear(False)

    alone.hook = called
    hear(True)
    seams.on_close(closed)
    return hear
