"""Which modules the code of a function names, without a call of it.

in its scope           what it reads of its closure, its globals and its defaults
in an object           the attributes that it reads of what it is a method of, or of what is in its scope
that object, whole     a module that it calls (`self(x)`), a part of which it reads, or that it hands on
not                    what it asks for its parameters or its mode alone: a penalty, an average of the weights

So does what it defines, and each method of such an object and each function of its scope that it reads, too.

Nothing of the program's runs for it: no property, no `__getattr__`, no `__class__` that a proxy makes up.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from itertools import islice, pairwise
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import nn

MOST_READ = 64  # codes, and items of a container: enough for any program, and no walk through a library
_READS = "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"
# What is asked of a module beside its call: by a penalty of its weights, an average of them, or for its mode.
_UNCALLED = {"buffers", "named_buffers", "named_parameters", "parameters", "requires_grad_", "state_dict", "zero_grad"}
_UNCALLED |= {"eval", "train", "training"}


def named_by(function: Any) -> Iterator[nn.Module]:
    """Each of them, some more than once; none of what is not written in Python."""
    todo: list[tuple[Any, Any]] = [(function, None)]
    seen: set[tuple[CodeType, int]] = set()
    home = ""
    while todo and len(seen) < MOST_READ:
        reading, owner = _plain(*todo.pop())
        if reading is None or (reading.__code__, id(owner)) in seen:
            continue
        code = reading.__code__
        seen.add((code, id(owner)))
        names = _names(code)
        home = home or _home(reading)
        found = []
        if owner is not None:
            whole = _hands_on(code)
            forward = whole or reading.__name__ == "forward"  # which has parameters and no parts, perhaps
            if is_module(owner) and (forward or not names.isdisjoint(_held(owner).get("_modules", ()))):
                yield owner
            found += [*_taken(owner, names), *(_values(owner) if whole else ())]
            todo += _methods(owner, names)
        for value in _scope(reading, names):
            found.append(value)
            if _home(reading) == home:  # a library's functions may lead to the program's models, its objects do not
                found += [*_taken(value, names), *_items(value)]
                todo += _methods(value, names)
        yield from (value for value in found if is_module(value))
        todo += [(value, None) for value in found if type(value) is not FunctionType or _own(value)]


def modules_in(value: Any) -> Iterable[nn.Module]:
    """It, or those that it has."""
    return (value,) if is_module(value) else [each for each in (*_items(value), *_values(value)) if is_module(each)]


def is_module(value: Any) -> bool:
    """What `isinstance` says without asking the value, which may be a proxy."""
    return issubclass(type(value), nn.Module)


def _plain(function: Any, owner: Any) -> tuple[FunctionType | None, Any]:
    """The function of Python's below a method, a property, decorators and a call, and what it is a method of."""
    for _ in range(MOST_READ):  # it may wrap itself
        kind = type(function)
        if kind is MethodType:
            function, owner = function.__func__, function.__self__
        elif kind is staticmethod:
            function, owner = function.__func__, None
        elif kind is classmethod:
            function = function.__func__
        elif issubclass(kind, partial | cached_property):
            function = function.func
        elif kind is property:
            function = function.fget
        elif (inner := _held(function).get("__wrapped__")) is not None:
            function = inner
        elif kind is FunctionType:
            return function, owner
        elif (call := _of_class(kind, "__call__")) is not None:
            function, owner = call, function
        else:
            break
    return None, None


def _scope(function: FunctionType, names: frozenset[str]) -> Iterator[Any]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            if name in names:
                yield cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    yield from [function.__globals__[name] for name in names if name in function.__globals__]
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _taken(value: Any, names: Iterable[str]) -> list[Any]:
    """What it has under these names."""
    held, kind = _held(value), type(value)
    parts = held.get("_modules", {}) if is_module(value) else {}
    found = [each[name] for each in (held, parts) for name in names if name in each]
    if kind is ModuleType:
        return [each for each in found if is_module(each)]
    for name in names:
        if type(slot := _of_class(kind, name)) is MemberDescriptorType:
            try:
                found.append(slot.__get__(value))
            except AttributeError:  # it has no value yet
                continue
    return found


def _methods(value: Any, names: Iterable[str]) -> list[tuple[Any, Any]]:
    methods = ((_of_class(type(value), name), value) for name in names)
    return [method for method in methods if method[0] is not None]


def _items(value: Any) -> list[Any]:
    """The first that a container holds."""
    kind = type(value)
    if kind is partial:
        return [*value.args, *value.keywords.values()]
    return [*islice(value.values() if kind is dict else value, MOST_READ)] if kind in (dict, list, tuple) else []


def _values(value: Any) -> list[Any]:
    """All that an object of the program's has."""
    kind = type(value)
    if not _own(kind):
        return []
    slots = [name for base in kind.__mro__ for name, at in vars(base).items() if type(at) is MemberDescriptorType]
    held = _held(value)
    return [*held.values(), *(held.get("_modules", {}).values() if is_module(value) else ()), *_taken(value, slots)]


def _held(value: Any) -> Mapping[str, Any]:
    """The attributes of an object."""
    try:
        held: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return {}
    return held


def _of_class(kind: type, name: str) -> Any:
    """What a class of the program's has for its objects under a name."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base) and _own(base)), None)


def _own(of: Any) -> bool:
    """Whether a class or a function is of the program, not of torch's or Python's own."""
    return _home(of) not in ("torch", "builtins", "functools", "narrowgauge")


def _home(of: Any) -> str:
    """The package that a class or a function is of."""
    return str(getattr(of, "__module__", "")).partition(".")[0]


@lru_cache(1024)  # what is called without gradients is asked for at each call
def _names(code: CodeType) -> frozenset[str]:
    """What it reads, but for what it only asks for its parameters, say."""
    return frozenset(name for each in _codes(code) for name in _reads(each))


def _reads(code: CodeType) -> Iterator[str]:
    steps = list(dis.get_instructions(code))
    for at, step in enumerate(steps):
        if step.opname in _READS:
            item = [each.opname for each in steps[at + 1 : at + 3]] == ["LOAD_CONST", "BINARY_SUBSCR"]
            then = steps[at + 3 if item else at + 1 :][:1]
            if not then or then[0].opname not in _READS or then[0].argval not in _UNCALLED:
                yield step.argval


@lru_cache(1024)
def _hands_on(code: CodeType) -> bool:
    """Whether a method does anything with its object but read and write its attributes."""
    return code.co_argcount > 0 and any(_uses(each, code.co_varnames[0]) for each in _codes(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and what is defined in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _uses(code: CodeType, own: str) -> bool:
    load = "LOAD_DEREF" if own in (*code.co_cellvars, *code.co_freevars) else "LOAD_FAST"
    for step, following in pairwise(dis.get_instructions(code)):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith(load) and own in loaded:
            attribute = "ATTR" in following.opname or following.opname in ("LOAD_METHOD", "COPY")
            if loaded[-1] != own or not attribute:
                return True
    return False
