"""Hears each call of what a program compiles, from `import torch` on: most compile their model before its optimizer.

    torch.compile(function)     its result is wrapped
    module.compile()            what the module then calls is wrapped
    torch.compile(module)       makes a module, which is called like any other

While a graph is traced nothing is told. Without a listener, before there is one and once it is gone, nothing is either.

In recorded steps what the program compiles runs uncompiled, so that its layers are seen. Functions that a library
compiles for itself have none inside (TransformerEngine's fused activations, torch's flex_attention): they run as ever,
or their results would be rounded otherwise than in the step before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

_LIBRARIES = ("torch.nn.attention", "transformer_engine")  # modules, and what is in them
_WARNING = r"Using `torch.compile\(module\)` when there are global hooks"


class CompiledCalls:
    """Wraps what is compiled from now on; `listener` hears `compiled_begins` and `compiled_ended`."""

    def __init__(self) -> None:
        self.listener: Any = None
        self._heard = False  # the program compiled something
        self._steps = False  # an optimizer's is among it
        self._graphs = 0  # that libraries compiled for themselves
        self._eager = False
        self._compile, self._compile_in_place = torch.compile, nn.Module.compile

        @functools.wraps(self._compile)
        def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if model is None:
                return lambda function: compile_(function, *args, **kwargs)
            compiled: Any = self._compile(model, *args, **kwargs)
            if _of_a_library(model):
                return self._as_ever(compiled)
            self._heard = True
            self._steps |= isinstance(getattr(model, "__self__", None), torch.optim.Optimizer)
            return compiled if isinstance(model, nn.Module) else self._followed(model, compiled)

        @functools.wraps(self._compile_in_place)
        def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._heard = True
            self._compile_in_place(module, *args, **kwargs)
            module._compiled_call_impl = self._followed(module, module._compiled_call_impl)  # type: ignore[arg-type]

        self._ours: tuple[Any, Any] = compile_, compile_in_place
        torch.compile, nn.Module.compile = compile_, compile_in_place  # type: ignore[assignment, method-assign]
        # A session hooks all modules, and leaves no trace in what is compiled: nothing to warn of.
        warnings.filterwarnings("ignore", message=_WARNING)
        self._filter = warnings.filters[0]

    def any(self) -> bool:
        """Whether the program compiles: it has asked for it, or something was compiled before we listened."""
        return self._heard or _graphs() > self._graphs

    @property
    def notes(self) -> list[str]:
        """What cannot be followed of it."""
        told = "An optimizer's step is compiled: steps that run in its graph are not seen, and missing here."
        return [told] if self._steps else []

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Meanwhile what the program compiled runs uncompiled."""
        self._eager = True
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._eager = False

    def adopt(self, module: nn.Module) -> None:
        """Know of a module that was compiled before, and follow it if that was in place."""
        call = module._compiled_call_impl
        self._heard |= call is not None or type(module).__name__ == "OptimizedModule"
        if call is not None and not hasattr(call, "followed"):
            module._compiled_call_impl = self._followed(module, call)

    def close(self) -> None:
        """Tell nobody any more, and wrap nothing more; what was wrapped runs on as it would without."""
        self.listener = None
        if torch.compile is self._ours[0]:  # unless somebody else has wrapped it since
            torch.compile = self._compile
        if nn.Module.compile is self._ours[1]:
            nn.Module.compile = self._compile_in_place  # type: ignore[method-assign]
        with suppress(ValueError):
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    def _as_ever(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            before = _graphs()
            try:
                if not self._eager:
                    return compiled(*args, **kwargs)
                with torch.compiler.set_stance("default"):
                    return compiled(*args, **kwargs)
            finally:
                self._graphs += _graphs() - before

        return call

    def _followed(self, owner: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.listener is None:  # traced: a part of what is compiled around it
                return compiled(*args, **kwargs)
            known, output = self.listener.compiled_begins(owner, args, kwargs), None
            try:
                output = compiled(*args, **kwargs)
            finally:
                if self.listener is not None:
                    self.listener.compiled_ended(known, output)
            return output

        call.followed = True  # type: ignore[attr-defined]
        return call


def _of_a_library(function: Any) -> bool:
    """Whether it is a library's own function; a method (`optimizer.step`) is the program's, whose object it is."""
    home = f"{getattr(function, '__module__', '')}."
    return inspect.isfunction(function) and any(home.startswith(f"{name}.") for name in _LIBRARIES)


def _graphs() -> int:
    """How many have been compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # which we load as well
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
