"""What scripts, traces or exports a converted model gets the plain one, in the baseline's precision.

    torch.jit.trace, trace_module     would record quantizers, of which TorchScript has no operators
    torch.jit.script                  would compile our layer
    torch.export                      its programs would look elsewhere for scales that live in this process
    torch.fx                          would follow into its kernels a layer that is none of torch's
    torch.onnx.export                 does one of these

Layers change their class meanwhile, as `narrowgauge.revert` does, but keep their state. So training goes on bit by bit
as if nothing had been asked, and a layer that another thread is in the midst of finds what it needs.

A graph of torch.fx holds the model's own layers, not copies: they are converted ones again when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import nn

from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.parallel.wrapped import class_of, exchange
from narrowgauge.session.doors.seams import Seams

Models = Callable[[], Iterable[nn.Module]]


def trace_plainly(seams: Seams, models: Models) -> None:
    """Until the seams are closed, what is traced is plain; `models` says what a traced function may call."""

    def door(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with plainly(*args, *kwargs.values(), models=models):
                return original(*args, **kwargs)

        return run

    def graph_door(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tracer: Any, root: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(root, nn.Module):  # torch's own compiler at work
                return original(tracer, root, *args, **kwargs)
            with plainly(root):
                return original(tracer, root, *args, **kwargs)

        return run

    inside = getattr(torch.jit, "_trace", None)  # what `trace` itself calls: a program may have taken its name before
    onnx = getattr(inside, "ONNXTracedModule", None)  # heard as a module that is called, and then it traces
    for owner, name in ((inside, "_trace_impl"), (torch.jit, "trace_module"), (onnx, "forward")):
        if hasattr(owner, name):
            seams.replace(owner, name, door)
    seams.replace(torch.fx.Tracer, "trace", graph_door)


@contextmanager
def plainly(*given: Any, models: Models = tuple) -> Iterator[None]:
    """Meanwhile the converted layers are plain ones, of the modules that are given (or bound methods) and `models`."""
    owners = [getattr(traced, "__self__", traced) for traced in given]
    held = {id(m): m for owner in (*owners, *models()) if isinstance(owner, nn.Module) for m in owner.modules()}
    layers = [module for module in held.values() if class_of(module) is Fp8Linear]
    for layer in layers:
        exchange(layer, nn.Linear)
    try:
        yield
    finally:
        for layer in layers:
            if class_of(layer) is nn.Linear:
                exchange(layer, Fp8Linear)
