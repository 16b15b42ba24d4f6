"""What a program does with a loss: scale it, call `backward` on it, clip what comes of it, step.

scaled    torch.amp.GradScaler.scale / .step     the loss before scaling; steps that were skipped
backward  torch.autograd.backward                the loss (Tensor.backward goes through it)
zeroed    Optimizer.zero_grad, Module.zero_grad  gradients, before a step was made of them
clipped   torch.nn.utils.clip_grad_norm_         the gradient norm before clipping, for nothing; what it calls tells,
                                                 as many programs have taken it by name before
stepped   torch's global optimizer step hooks    the end of a step; a closure is followed as it is called; compiled
                                                 or not (`optimizer_steps`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import NO_TASK, backward_task
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.nn.tracing.optimizer_steps import hear_steps
from narrowgauge.compute.nn.tracing.telling import tell, telling
from narrowgauge.session.doors.clipped import Clipped, by_torchs_clip, with_gradients
from narrowgauge.session.doors.hearing import capturing
from narrowgauge.session.doors.seams import Seams

INPUTS = 4  # its place among the arguments of backward, behind what that is called on
_compiling = torch.compiler.is_dynamo_compiling  # then nobody may ask whether seams rest

# Of an engine that clips and skips by itself: the norm of its gradients from before, whether it skipped, and the
# optimizers that it holds.
Told = tuple[float | torch.Tensor | None, bool, Sequence[Optimizer]]


class HearsUpdates(Protocol):
    """Hears of backward passes and optimizers."""

    ended: int  # so many steps of optimizers were heard

    @property
    def settled(self) -> bool:
        """Whether the open step is neither recorded nor one of the first."""

    @property
    def alone(self) -> HearsUpdatesAlone:
        """Who hears of them while seams rest."""

    def loss_scaled(self, scaler: Any, before: Any, after: Any) -> None:
        """A gradient scaler turned `before` into `after`."""

    def backward_begins(self, loss: Any, plain: bool) -> None:
        """`backward(loss)` is called; `plain` if with nothing else."""

    def backward_ended(self, loss: Any) -> None:
        """It returned."""

    def backward_failed(self) -> None:
        """It raised."""

    def gradients_zeroed(self, owner: Optimizer | nn.Module) -> None:
        """Those of an optimizer's or a module's parameters were set to zero, or to nothing."""

    def gradients_clipped(self, norm: Any, order: float, of: frozenset[int] | None = None) -> None:
        """The gradients `of` these parameters were clipped; `norm`, of that order, is theirs from before."""

    def step_begins(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Callable[[], Any] | None:
        """An optimizer is about to step; returns the closure to call instead of the one that it was given."""

    def step_ended(self, optimizer: Optimizer, early: bool) -> None:
        """It stepped; if `early`, in a graph that has yet to write the new weights."""

    def scaler_skipped(self, optimizer: Optimizer) -> None:
        """A gradient scaler's step returned, and none was made in it."""


class HearsUpdatesAlone(Protocol):
    """The same while seams rest; what says whether that is all is told otherwise as well if it is not."""

    hook: Callable[[Optimizer, bool], None] | None  # what ended steps are told

    def interrupted(self) -> None:
        """Who hears of it by fewer functions is not told of what comes."""

    def backward_begins(self, loss: Any) -> bool:
        """`backward(loss)` is called; whether that is all."""

    def backward_ended(self, *, failed: bool = False) -> None:
        """It returned, or `failed`."""

    def scaled(self, scaler: Any, before: Any, after: Any) -> bool:
        """A gradient scaler turned `before` into `after`; whether that is all."""

    def step_begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step; whether that is all."""

    def closure(self, closure: Any, optimizer: Optimizer) -> Any:
        """What to call instead of the closure that it was given."""
        ...

    def step_ended(self, optimizer: Optimizer) -> bool:
        """It stepped; whether that is all."""


class HearsCaptures(Protocol):
    """Hears of what is called while a CUDA graph is captured."""

    def backward_captured(self, loss: Any) -> None:
        """`backward` was called."""

    def clip_captured(self, norm: Any, order: float, of: frozenset[int] | None = None) -> None:
        """Gradients were clipped."""

    def step_captured(self, optimizer: Optimizer) -> None:
        """An optimizer stepped."""


@passed_over
def reaches_no_parameter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether backward is asked, by `inputs`, for gradients of other tensors alone: of what a model was given, say."""
    inputs = args[INPUTS] if len(args) > INPUTS else kwargs.get("inputs")
    several = [inputs] if isinstance(inputs, torch.Tensor) else inputs if isinstance(inputs, list | tuple) else ()
    return bool(several) and not any(isinstance(each, nn.Parameter) for each in several)


@passed_over
def closure_of(args: Any, kwargs: Any) -> Any:
    """What an optimizer's step was given to call, if anything."""
    return args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None


@passed_over
def with_closure(followed: Any, args: Any, kwargs: Any) -> Any:
    """What torch's hook hands on, so that the step calls this instead."""
    return (args, {**kwargs, "closure": followed}) if len(args) < 2 else ((args[0], followed, *args[2:]), kwargs)


def follow(seams: Seams, updates: HearsUpdates, graphs: HearsCaptures) -> None:
    """Tell `updates`, or `graphs` of what is captured, until the seams are closed."""
    _follow_losses(seams, updates, graphs)
    _follow_clips(seams, updates, graphs)

    def step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        alone = seams.resting and updates.alone.step_begins(optimizer)
        closure = closure_of(args, kwargs)
        if not alone:
            followed = updates.step_begins(optimizer, closure if callable(closure) else None)
        elif closure is None:
            return None
        else:
            followed = updates.alone.closure(closure, optimizer)
        return None if followed is None or followed is closure else with_closure(followed, args, kwargs)

    def step_ended(optimizer: Optimizer, early: bool) -> None:
        if seams.resting and updates.alone.step_ended(optimizer):
            return
        if capturing():
            graphs.step_captured(optimizer)
        else:
            updates.step_ended(optimizer, early)

    updates.alone.hook = step_ended
    seams.on_close(hear_steps(step_ended, step_begins))


def _follow_losses(seams: Seams, updates: HearsUpdates, graphs: HearsCaptures) -> None:
    def backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # A reentrant checkpoint's own backward is no new microbatch, nor is one of an input's gradient alone.
            some = kwargs.get("inputs") is not None or len(args) > INPUTS
            if backward_task() != NO_TASK or not seams.telling or (some and reaches_no_parameter(args, kwargs)):
                original(tensors, *args, **kwargs)
                return
            if seams.waits is not None and seams.waits.taken:  # the program has put this into its place again
                updates.alone.interrupted()
            if seams.resting and updates.alone.backward_begins(tensors):
                try:
                    original(tensors, *args, **kwargs)
                except BaseException:
                    updates.alone.backward_ended(failed=True)
                    raise
                updates.alone.backward_ended()
                return
            if capturing():
                graphs.backward_captured(tensors)
                original(tensors, *args, **kwargs)
                return
            plain = True
            for given in (*args, *kwargs.values()):
                plain = plain and (given is None or given is False)
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
            alone = not _compiling() and seams.resting and updates.alone.scaled(self, outputs, scaled)
            if seams.telling and not alone:
                updates.loss_scaled(self, outputs, scaled)
            return scaled

        return run

    def scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = updates.ended
            out = original(self, optimizer, *args, **kwargs)
            if updates.ended == before and seams.telling:
                updates.scaler_skipped(optimizer)
            return out

        return run

    def zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if _compiling() or not seams.telling:
                return
            waits = seams.waits
            if waits is not None and waits.taken:
                if not waits.backwards:  # behind a step, as mostly
                    return
                if (waits.looks or waits.parts) and waits.clears(self):
                    return
            updates.gradients_zeroed(self)

        return run

    seams.replace(torch.autograd, "backward", backward, alone=True)
    seams.replace(Optimizer, "zero_grad", zero_grad, alone=True)
    seams.replace(nn.Module, "zero_grad", zero_grad, alone=True)
    seams.replace(torch.amp.GradScaler, "step", scaler_step, alone=True)
    heard: set[type] = set()

    def hear_scales(kind: type) -> None:
        """FSDP's, say, does not call the one that it overrides."""
        for owner in kind.__mro__:
            if "scale" in vars(owner) and owner not in heard and issubclass(owner, torch.amp.GradScaler):
                heard.add(owner)
                seams.replace(owner, "scale", scale, alone=True)

    def scaler_made(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            hear_scales(type(self))
            original(self, *args, **kwargs)

        return init

    kinds = [torch.amp.GradScaler]
    for kind in kinds:
        hear_scales(kind)
        kinds.extend(kind.__subclasses__())
    seams.replace(torch.amp.GradScaler, "__init__", scaler_made)


def _follow_clips(seams: Seams, updates: HearsUpdates, graphs: HearsCaptures) -> None:
    @passed_over
    def clipped(order: float, norm: Any, of: frozenset[int] | None = None) -> None:
        if not seams.resting:  # a graph tells always
            (graphs.clip_captured if capturing() else updates.gradients_clipped)(norm, float(order), of)

    clips, forget = telling(lambda order, norms: clipped(order, norms[0]))
    seams.on_close(forget)

    def clip(original: Callable[..., Any]) -> Callable[..., Any]:
        code = getattr(original, "__code__", None)  # of the program's own nobody knows what it returns
        torchs = code is not None and code.co_filename == torch.nn.utils.clip_grad.__file__

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                norm = original(*args, **kwargs)
                if type(norm) is torch.Tensor and _order(args, kwargs, 2) == 2.0:
                    tell(clips, 2, [norm])
                return norm
            before = scaled[0]
            norm = original(*args, **kwargs)
            if torchs and scaled[0] == before:  # it was compiled by itself: what it calls lies in its graph
                of = unseen_by_modes(with_gradients, args[0] if args else kwargs["parameters"])
                clipped(_order(args, kwargs, 2), norm, of)
            return norm

        return run

    scaled = [0]  # calls of what scales gradients down
    known = Clipped()
    other: list[Any] = [None, 2.0]  # the last norm that was no L2 norm, and its order

    def norm_taken(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            if not torch.compiler.is_dynamo_compiling():
                order = _order(args, kwargs, 1)
                other[:] = [None if order == 2.0 else norm, order]
                if updates.settled and by_torchs_clip():
                    known.norm_taken(norm, args[0] if args else kwargs.get("tensors"))
            return norm

        return run

    def scaled_down(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            if not torch.compiler.is_dynamo_compiling():
                norm = kwargs.get("total_norm", args[2] if len(args) > 2 else None)
                scaled[0] += 1
                parameters = args[0] if args else kwargs["parameters"]
                if updates.settled and by_torchs_clip():
                    of = unseen_by_modes(known.with_gradients, parameters, norm)
                else:
                    of = unseen_by_modes(with_gradients, parameters)
                clipped(other[1] if norm is other[0] else 2.0, norm, of)

        return run

    for name, mark, make in (
        ("clip_grad_norm_", "", clip),
        ("get_total_norm", "_", norm_taken),
        ("clip_grads_with_norm_", "_", scaled_down),
    ):  # one and the same in both places: what pickles it finds it by its name
        seams.replace(torch.nn.utils.clip_grad, f"{mark}{name}", make, rests=True, also=(torch.nn.utils, name))
    seams.is_held(torch.nn.utils, ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"))


@passed_over
def _order(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> float:
    """The order of the norm that gradients are clipped by, which is given by name or at this place."""
    return float(kwargs.get("norm_type", args[place] if len(args) > place else 2.0))
