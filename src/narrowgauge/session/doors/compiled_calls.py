"""Hears each call of what a program compiles, from `import torch` on: most compile their model before its optimizer.

    torch.compile(function)     its result is wrapped
    module.compile()            does so with what the module calls
    torch.compile(module)       makes a module, which is called like any other; Lightning compiles the methods of the
                                module by what that was made with (compiling_context.py)

While a graph is traced nothing is told. Without a listener, before there is one and once it is gone, nothing is either.

In recorded steps what the program compiles runs uncompiled, or in graphs of its own (recorded_graphs.py), so that its
layers are seen. Functions that a library compiles for itself have none inside (TransformerEngine's fused activations,
updates of torchao's optimizers, torch's flex_attention): they run as ever, or their results would be rounded otherwise
than in the step before. So do torch.cond and its like, which uncompiled lose gradients of the weights that they read:
layers in these are not seen. So does an optimizer's step without a closure, when all has been seen of the layers.

What was compiled before we listened, or past us, has no wrapper: torch tells that it is called (entries.py). It runs as
ever, too. Called inside of what runs uncompiled it does not: it is a part of that one's graph, and has none of its own.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing import optimizer_steps
from narrowgauge.compute.nn.tracing.marks import inlined
from narrowgauge.session.doors import compilations, recorded_graphs
from narrowgauge.session.doors.compilations import Compilations, HearsCompiled, HearsGraphs, Whose
from narrowgauge.session.doors.compiling_context import Context
from narrowgauge.session.doors.entries import Entries, Leave, nothing
from narrowgauge.session.doors.stance import Uncompiled, count_as_compiled, stance
from narrowgauge.session.doors.unseen import unseen

_WARNING = r"Using `torch.compile\(module\)` when there are global hooks"


class _OfThread(threading.local):
    whose: Whose = "unheard"  # whose call the calling thread is in, the innermost that is not unheard


_here = _OfThread()


class CompiledCalls(Compilations):
    """Wraps what is compiled from now on, and tells `listener` of its calls.

    `graphs` is told of all calls that run compiled, whatever was compiled when.
    What one has wrapped tells the next one when the first is closed: a function may be compiled once and watched often.
    """

    _latest: ClassVar[CompiledCalls | None] = None
    _wrapped: ClassVar[WeakSet[Callable[..., Any]]] = WeakSet()  # by this one or an earlier one, and still there

    def __init__(self) -> None:
        self.listener: HearsCompiled | None = None
        self.graphs: HearsGraphs | None = None
        self._entries = Entries(self._entered, self._unheard)
        self._heard = bool(self._wrapped)  # the program compiled something
        self._graphs = 0  # that libraries compiled for themselves
        self._eager = False
        self._failed: Callable[[Exception], None] | None = None  # in graphs of recorded steps: told if one fails
        self._gave_up = False  # one failed in this step: each call would try again
        self._depth = 0  # calls that are followed and have not returned
        self._stance, self._lasts = Uncompiled(), False  # which lasts until they have
        self._ident = 0  # of the thread that has asked for it
        self._compile = torch.compile

        @unseen
        @functools.wraps(self._compile)
        def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if model is None:
                return lambda function: compile_(function, *args, **kwargs)
            compiled: Any = self._compile(inlined(model), *args, **kwargs)
            if compilations.of_a_library(model):
                return self._as_ever(compiled)
            self._heard = True
            optimizer_steps.settle()
            if self.listener is not None:
                self.listener.compiles()
            optimizer = compilations.optimizer_of(model)
            if optimizer is not None:
                return self._updating(optimizer, compiled)
            if isinstance(model, nn.Module):
                return self._of_module(compiled)
            return self._followed(compilations.called_by(model), compiled)

        CompiledCalls._latest = self
        self._ours = torch.compile = compile_
        # A session hooks all modules, and leaves no trace in what is compiled: nothing to warn of.
        warnings.filterwarnings("ignore", message=_WARNING)
        self._filter = warnings.filters[0]

    def any(self) -> bool:
        """Whether the program compiles: it has asked for it, or something was compiled before we listened."""
        return self._heard or compilations.graphs() > self._graphs

    def followed(self) -> bool:
        """Whether it has asked for it where we listened: of what is older than that no call is heard."""
        return self._heard

    def told(self) -> bool:
        """Whether torch tells of each call that begins from now on."""
        self._entries.settle()
        return self._entries.open()

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Meanwhile what the program compiled runs uncompiled, and until a call of it that runs now has returned.

        torch looks when a call of `fullgraph=True` returns whether it was compiled, or not to be.
        """
        self._eager, self._lasts, self._ident = True, False, threading.get_ident()
        self._stance.begin()
        try:
            yield
        finally:
            self._eager, self._lasts = False, self._depth > 0
            if not self._lasts:
                self._stance.end()

    @contextmanager
    def in_graphs(self, failed: Callable[[Exception], None]) -> Iterator[None]:
        """Meanwhile what the program compiled runs in graphs of recorded steps; `failed` is told why one cannot."""
        self._failed, self._gave_up = failed, False
        try:
            yield
        finally:
            self._failed = None

    def inside(self) -> bool:
        """Whether a call of a compiled function runs."""
        return self._depth > 0

    def adopt(self, module: nn.Module) -> None:
        """Know of a module that was compiled before, and follow it if that was in place."""
        call = module._compiled_call_impl
        if type(module).__name__ == "OptimizedModule":
            self._heard = True
            self._of_module(module)
        self._heard |= call is not None
        if call is not None and not hasattr(call, "followed"):
            module._compiled_call_impl = self._followed(module, call)

    def close(self) -> None:
        """Tell nobody any more, and wrap nothing more; what was wrapped runs on as it would without."""
        self.listener = self.graphs = None
        self._entries.close()
        if torch.compile is self._ours:  # unless somebody else has wrapped it since
            torch.compile = self._compile
        with suppress(ValueError):
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    def _heir(self) -> CompiledCalls:
        """Who follows what was wrapped here."""
        return self if self.listener is not None or self._latest is None else self._latest

    def _as_ever(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @unseen
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return compiled(*args, **kwargs)
            before, heir, around = compilations.graphs(), self._heir(), _here.whose
            inside, compilations.as_ever = compilations.as_ever, True
            _here.whose = "bare"
            try:
                if not heir._eager and not (heir._gave_up and heir._failed is not None):
                    return compiled(*args, **kwargs)
                with torch.compiler.set_stance("default"):
                    return compiled(*args, **kwargs)
            finally:
                compilations.as_ever = inside
                _here.whose = around
                heir._graphs += compilations.graphs() - before

        return call

    def _updating(self, optimizer: ref[Optimizer], compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A method of an optimizer's, whose hooks tell the rest of it."""

        @unseen
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or (heir := self._heir()).listener is None:
                return compiled(*args, **kwargs)
            stepping, known, around = optimizer(), None, _here.whose
            closure = any(given is not None for given in (*args, *kwargs.values()))
            if closure:  # a whole step of training, perhaps
                known = heir.listener.compiled_begins(compiled, (), {})
            elif stepping is not None:
                heir.listener.update_begins(stepping)
            _here.whose = "followed" if closure else "bare"
            try:
                with heir._call(known) as told:
                    told[1] = compiled(*args, **kwargs)
            finally:
                _here.whose = around
            return told[1]

        self._wrapped.add(call)
        return call

    def _of_module(self, module: Any) -> Any:
        """What torch.compile made of a module: its forward is the compiled one."""
        compiled = vars(module).get("forward")
        if compiled is None or hasattr(compiled, "followed"):
            return module

        @unseen
        @functools.wraps(compiled)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return self._heir()._run(compiled, args, kwargs)
            return compiled(*args, **kwargs)

        forward.followed = True  # type: ignore[attr-defined]
        module.forward = forward
        module.dynamo_ctx = Context(module.dynamo_ctx, self._of_context)
        return module

    def _of_context(self, function: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return self._followed(compilations.called_by(function), compiled)

    @unseen
    def _run(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._stance.look()
        around, _here.whose = _here.whose, "followed"
        try:
            if self._failed is None or self.listener is None or not self.listener.learns():
                return compiled(*args, **kwargs)
            if self._gave_up:
                return recorded_graphs.uncompiled(compiled, args, kwargs)
            return recorded_graphs.run(compiled, args, kwargs, self._given_up)
        finally:
            _here.whose = around

    def _entered(self) -> Leave:
        """A call of something compiled begins, anyone's."""
        if self.graphs is None:
            return nothing
        whose, again = _here.whose, nothing
        if whose != "bare" and self.listener is not None:
            self.listener.compiles()
        if whose == "unheard" and self._ident == threading.get_ident() and not inside_backward():
            again = self._stance.pause()
        if stance() == "force_eager":
            count_as_compiled()  # on whichever thread: what is ours may be over when it returns
            return again
        try:
            over = self.graphs.compiled_runs(whose)
        except Exception:
            again()
            raise

        def left() -> None:
            try:
                again()
            finally:
                over()

        return left

    def _unheard(self, error: Exception) -> None:
        if self.graphs is not None:
            self.graphs.compiled_unheard(error)

    def _given_up(self, error: Exception) -> None:
        self._gave_up = True
        if self._failed is not None:
            self._failed(error)

    @contextmanager
    def _call(self, known: Any) -> Iterator[list[Any]]:
        """A call of what is compiled; of what is given, the second is what it returned."""
        told, left = [known, None], True
        self._depth += 1
        try:
            yield told
            left = False
        finally:
            self._depth -= 1
            if not self._depth and self._lasts:
                self._lasts = False
                self._stance.end()
            if self.listener is not None:
                self.listener.compiled_ended(*told, left=left)

    def _followed(self, owner: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @unseen
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Traced, it is a part of what is compiled around it.
            if torch.compiler.is_dynamo_compiling() or (heir := self._heir()).listener is None:
                return compiled(*args, **kwargs)
            with heir._call(heir.listener.compiled_begins(owner, args, kwargs)) as told:
                told[1] = heir._run(compiled, args, kwargs)
            return told[1]

        call.followed = True  # type: ignore[attr-defined]
        self._wrapped.add(call)
        return call
