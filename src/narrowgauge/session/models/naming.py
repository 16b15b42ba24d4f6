"""Which modules the code of a function names, without a call of it.

in its scope           what it reads of its closure and its globals
in its object          the attributes that it reads of what it is a method of
that object, whole     a module that it calls (`self(x)`), a part of which it reads, or that it hands on

So does what it defines, and each method of the same object and each function of its scope that it reads, too.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

MOST_READ = 64  # codes: enough for any program, and no walk through a library


def named_by(function: Any) -> Iterator[nn.Module]:
    """Each of them, some more than once; none of what is not written in Python."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    inner = _plain(function)
    if inner is None:
        return
    names, scope, whole = _read(inner, type(owner))
    held = vars(owner) if owner is not None and hasattr(owner, "__dict__") else {}
    parts = held.get("_modules", {}) if isinstance(owner, nn.Module) else {}
    if isinstance(owner, nn.Module) and (whole or not names.isdisjoint(parts)):
        yield owner
    for value in (*scope, *(value for name, value in {**held, **parts}.items() if whole or name in names)):
        if isinstance(value, nn.Module):
            yield value


def _read(function: FunctionType, kind: type) -> tuple[set[str], list[Any], bool]:
    """The names that it reads of its object, what its scope has, and whether it uses that object as a whole."""
    methods = {name: value for base in reversed(kind.__mro__) if _own(base) for name, value in vars(base).items()}
    names: set[str] = set()
    scope: list[Any] = []
    whole, todo, seen = False, [(function, kind is not type(None))], set[CodeType]()
    while todo and len(seen) < MOST_READ:
        reading, bound = todo.pop()
        codes = [] if reading.__code__ in seen else [*_codes(reading.__code__)]
        seen.add(reading.__code__)
        own = reading.__code__.co_varnames[0] if bound and reading.__code__.co_argcount else ""
        found = list(_closure(reading))
        for code in codes:
            whole |= bool(own) and _uses(code, own)
            found += [reading.__globals__[name] for name in code.co_names if name in reading.__globals__]
            if bound:
                called = [methods[name] for name in code.co_names if name in methods]
                todo += [(each, not isinstance(m, staticmethod)) for m in called if (each := _plain(m)) is not None]
                names.update(code.co_names)
        scope += found
        todo += [(value, False) for value in found if isinstance(value, FunctionType) and _own(value)]
    return names, scope, whole


def _own(of: Any) -> bool:
    """Whether a class or a function is of the program, not of torch's or Python's own."""
    return str(getattr(of, "__module__", "")).partition(".")[0] not in ("torch", "builtins", "functools", "narrowgauge")


def _plain(function: Any) -> FunctionType | None:
    """The function of Python's below a method, a property and decorators."""
    if isinstance(function, property):
        function = function.fget
    elif isinstance(function, MethodType | staticmethod | classmethod):
        function = function.__func__
    try:
        inner = inspect.unwrap(function) if callable(function) else None
    except ValueError:  # it wraps itself
        return None
    return inner if isinstance(inner, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and what is defined in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            continue


@lru_cache(1024)  # what is called without gradients is asked for at each call
def _uses(code: CodeType, own: str) -> bool:
    """Whether it does anything with `own` but read and write its attributes."""
    load = "LOAD_DEREF" if own in (*code.co_cellvars, *code.co_freevars) else "LOAD_FAST"
    steps = list(dis.get_instructions(code))
    for step, following in pairwise(steps):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith(load) and own in loaded:
            attribute = "ATTR" in following.opname or following.opname in ("LOAD_METHOD", "COPY")
            if loaded[-1] != own or not attribute:
                return True
    return False
