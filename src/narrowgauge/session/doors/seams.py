"""Where a running PyTorch program can be watched and changed without editing it.

Each seam is one function of torch's that every training program must pass: making an optimizer, calling a module,
`backward`, an optimizer's step. `Seams` replaces or hooks them, tells who listens, and can undo it all.

    held      torch's module registration hook             which module is a part of which
    made      torch.optim.Optimizer.__init__               which parameters are trained
              torch.optim.Optimizer.__setstate__           the same, of one that is copied or unpickled
    called    torch's global forward pre-hook              the outermost call of a module that owns such parameters
    backward  torch.autograd.backward                      the loss (Tensor.backward goes through it)
    stepped   torch's global optimizer step hooks          the end of a step; a closure is followed as it is called;
                                                           compiled or not (`optimizer_steps`)
    scaled    torch.amp.GradScaler.scale / .step           the loss before scaling; steps that were skipped
    clipped   torch.nn.utils.clip_grad_norm_               the gradient norm before clipping, for nothing; what it calls
                                                           tells, as many programs have taken it by name before
    kept      torch's reentrant checkpoints                what runs without gradients now, and with them later
    loaded    torch.utils.data's iterators                 how long the program waits for a batch
    compiled  torch.compile, nn.Module.compile             turned into no-ops, and told; or let be (`compiled_calls`)

A program may replace the same functions: whoever came last is outside, and closing takes nothing away from it. Ours
then stays where it is and tells nobody.

What is compiled must stay so: our hooks do nothing while a graph is traced, and leave no trace in it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data.dataloader import _BaseDataLoaderIter

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.optimizer_steps import OURS, hear_steps
from narrowgauge.compute.nn.tracing.telling import tell, telling
from narrowgauge.session.doors.hearing import capturing


class HearsMaking(Protocol):
    """Hears of what the program makes."""

    def module_registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """A module got a submodule."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was constructed."""

    def optimizer_restored(self, optimizer: Optimizer) -> None:
        """An optimizer got a state as a whole: one that was copied or unpickled, or one that is known."""

    def compile_refused(self) -> None:
        """torch.compile was asked for."""


class HearsCalls(Protocol):
    """Hears of modules."""

    def module_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is about to run its forward."""

    def checkpoint_runs(self, runs: bool) -> None:
        """A reentrant checkpoint's first forward begins, or has ended."""

    def batch_loaded(self, seconds: float) -> None:
        """A data loader gave a batch (or had no more) after so long."""


class HearsUpdates(Protocol):
    """Hears of backward passes and optimizers."""

    def loss_scaled(self, scaler: Any, before: Any, after: Any) -> None:
        """A gradient scaler turned `before` into `after`."""

    def backward_begins(self, loss: Any, plain: bool) -> None:
        """`backward(loss)` is called; `plain` if with nothing else."""

    def backward_ended(self, loss: Any) -> None:
        """It returned."""

    def backward_failed(self) -> None:
        """It raised."""

    def gradients_clipped(self, norm: Any, order: float) -> None:
        """Gradients were clipped; `norm`, of that order, is theirs from before."""

    def step_begins(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Callable[[], Any] | None:
        """An optimizer is about to step; returns the closure to call instead of the one that it was given."""

    def step_ended(self, optimizer: Optimizer, early: bool) -> None:
        """It stepped; if `early`, in a graph that has yet to write the new weights."""

    def scaler_stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        """A gradient scaler stepped, or skipped."""


class HearsCaptures(Protocol):
    """Hears of what is called while a CUDA graph is captured."""

    def backward_captured(self, loss: Any) -> None:
        """`backward` was called."""

    def clip_captured(self, norm: Any, order: float) -> None:
        """Gradients were clipped."""

    def step_captured(self, optimizer: Optimizer) -> None:
        """An optimizer stepped."""


class Seams:
    """All seams of one process; `close()` leaves torch as it was found."""

    def __init__(
        self,
        making: HearsMaking,
        calls: HearsCalls,
        updates: HearsUpdates,
        graphs: HearsCaptures,
        *,
        compiling: bool = False,
    ) -> None:
        self._undo = ExitStack()
        self._telling = True
        self._originals: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._open(making, calls, updates, graphs, compiling)

    def close(self) -> None:
        """Undo every replacement and hook, in reverse order; what the program has wrapped stays, and tells nobody."""
        self._telling = False
        self._undo.close()

    def hear_modules(self, heard: bool) -> None:
        """Hear modules' calls, or none: where there is a hook for all of them, torch takes a longer way to each."""
        hooks = nn.modules.module._global_forward_pre_hooks
        if not heard and hooks.get(OURS) is self._called:
            del hooks[OURS]
        elif heard and self._telling:
            hooks[OURS] = self._called

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `make(original)` in the place of `owner.name` until closed."""
        original, own = getattr(owner, name), name in vars(owner)
        ours = make(original)

        @functools.wraps(original)
        def seam(*args: Any, **kwargs: Any) -> Any:
            return (ours if self._telling else original)(*args, **kwargs)

        def undo() -> None:
            if getattr(owner, name) is not seam:
                return
            if own:
                setattr(owner, name, original)
            else:  # it was inherited
                delattr(owner, name)

        setattr(owner, name, seam)
        self._originals[seam] = original
        self._undo.callback(undo)

    def original(self, function: Any) -> Any:
        """What stood where `function` stands now; itself if it is none of ours."""
        return self._originals.get(function, function) if isinstance(function, FunctionType) else function

    def _open(
        self, making: HearsMaking, calls: HearsCalls, updates: HearsUpdates, graphs: HearsCaptures, compiling: bool
    ) -> None:
        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                making.optimizer_made(self)

            return init

        def restored(original: Callable[..., Any]) -> Callable[..., Any]:
            def set_state(self: Optimizer, state: Any) -> None:
                original(self, state)
                making.optimizer_restored(self)

            return set_state

        def backward(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(tensors: Any, *args: Any, **kwargs: Any) -> None:
                if inside_backward():  # a reentrant checkpoint's own backward is no new microbatch
                    original(tensors, *args, **kwargs)
                    return
                if capturing():
                    graphs.backward_captured(tensors)
                    original(tensors, *args, **kwargs)
                    return
                plain = not any(a is not None and a is not False for a in (*args, *kwargs.values()))
                updates.backward_begins(tensors, plain)
                try:
                    original(tensors, *args, **kwargs)
                except BaseException:
                    updates.backward_failed()
                    raise
                updates.backward_ended(tensors)

            return run

        def scale(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: Any, outputs: Any) -> Any:
                scaled = original(self, outputs)
                updates.loss_scaled(self, outputs, scaled)
                return scaled

            return run

        def scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                out = original(self, optimizer, *args, **kwargs)
                updates.scaler_stepped(self, optimizer)
                return out

            return run

        def clipped(order: float, norm: Any) -> None:
            (graphs.clip_captured if capturing() else updates.gradients_clipped)(norm, float(order))

        clips, forget = telling(lambda order, norms: clipped(order, norms[0]))
        self._undo.callback(forget)

        def clip(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                norm = original(*args, **kwargs)
                if torch.compiler.is_compiling() and type(norm) is torch.Tensor and _order(args, kwargs, 2) == 2.0:
                    tell(clips, 2, [norm])
                return norm

            return run

        other: list[Any] = [None, 2.0]  # the last norm that was no L2 norm, and its order

        def norm_taken(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                norm = original(*args, **kwargs)
                if not torch.compiler.is_compiling():
                    order = _order(args, kwargs, 1)
                    other[:] = [None if order == 2.0 else norm, order]
                return norm

            return run

        def scaled_down(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                original(*args, **kwargs)
                if not torch.compiler.is_compiling():
                    norm = kwargs.get("total_norm", args[2] if len(args) > 2 else None)
                    clipped(other[1] if norm is other[0] else 2.0, norm)

            return run

        def checkpointed(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled() or inside_backward() or torch.compiler.is_compiling():
                    return original(*args, **kwargs)
                calls.checkpoint_runs(True)
                try:
                    return original(*args, **kwargs)
                finally:
                    calls.checkpoint_runs(False)

            return run

        def next_batch(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: Any) -> Any:
                began = time.perf_counter()
                try:
                    return original(self)
                finally:
                    calls.batch_loaded(time.perf_counter() - began)

            return run

        def no_compile(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(model: Any = None, *args: Any, **kwargs: Any) -> Any:
                making.compile_refused()
                return (lambda function: function) if model is None else model

            return run

        def no_module_compile(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: nn.Module, *args: Any, **kwargs: Any) -> None:
                making.compile_refused()

            return run

        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not torch.compiler.is_compiling():  # while a graph is traced nothing is called yet
                calls.module_called(module, args)

        def step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            followed = updates.step_begins(optimizer, closure if callable(closure) else None)
            if followed is None or followed is closure:
                return None
            return (
                (args, {**kwargs, "closure": followed}) if len(args) < 2 else ((args[0], followed, *args[2:]), kwargs)
            )

        def step_ended(optimizer: Optimizer, early: bool) -> None:
            if capturing():
                graphs.step_captured(optimizer)
            else:
                updates.step_ended(optimizer, early)

        self.replace(Optimizer, "__init__", made)
        self.replace(Optimizer, "__setstate__", restored)
        self.replace(torch.autograd, "backward", backward)
        self.replace(torch.amp.GradScaler, "scale", scale)
        self.replace(torch.amp.GradScaler, "step", scaler_step)
        self.replace(torch.nn.utils, "clip_grad_norm_", clip)
        self.replace(torch.nn.utils.clip_grad, "clip_grad_norm_", clip)
        for owner, mark in ((torch.nn.utils, ""), (torch.nn.utils.clip_grad, "_")):
            self.replace(owner, f"{mark}get_total_norm", norm_taken)
            self.replace(owner, f"{mark}clip_grads_with_norm_", scaled_down)
        self.replace(CheckpointFunction, "apply", checkpointed)
        self.replace(_BaseDataLoaderIter, "__next__", next_batch)
        if not compiling:
            self.replace(torch, "compile", no_compile)
            self.replace(nn.Module, "compile", no_module_compile)

        def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if not torch.compiler.is_compiling():  # a slice of a list of modules is a list of its own
                making.module_registered(parent, child)

        handles = (nn.modules.module.register_module_module_registration_hook(registered),)
        self._called = called
        self.hear_modules(True)
        self._undo.callback(self.hear_modules, False)
        for handle in handles:
            self._undo.callback(handle.remove)
        self._undo.callback(hear_steps(step_ended, step_begins))


def _order(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> float:
    """The order of the norm that gradients are clipped by, which is given by name or at this place."""
    return float(kwargs.get("norm_type", args[place] if len(args) > place else 2.0))
