"""Which modules the code of a function names, without a call of it.

in its scope           what it reads of its closure, its globals and its defaults
in an object           the attributes that it reads of what it is a method of or is in its scope, or of the class
that object, whole     a module that it calls (`self(x)`), a part of which it reads, or that it hands on
not                    what it asks for its parameters or its mode alone: a penalty, an average of the weights

So does what it defines, and each method of such an object and each function of its scope that it reads, too. What is
read first comes first.

Nothing of the program's runs for it: no property, no `__getattr__`, no `__class__` that a proxy makes up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import nn

from narrowgauge.session.models.code_names import hands_on, names_of

MOST_READ = 64  # functions, and items of a container: enough for any program, and no walk through a library


def named_by(function: Any) -> Iterator[nn.Module]:
    """Each of them, some more than once; none of what is not written in Python."""
    todo: list[tuple[Any, Any]] = [(function, None)]
    seen: dict[tuple[int, int], Any] = {}  # by the ids of both, which it keeps alive
    home = ""
    while todo and len(seen) < MOST_READ:
        reading, owner = _plain(*todo.pop())
        at = id(reading), id(owner)
        if reading is None or at in seen:
            continue
        seen[at] = reading, owner
        names = names_of(reading.__code__)
        home = home or _home(reading)
        found = []
        if owner is not None:
            whole = hands_on(reading.__code__)
            forward = whole or reading.__name__ == "forward"  # which has parameters and no parts, perhaps
            if is_module(owner) and (forward or any(name in _held(owner).get("_modules", ()) for name in names)):
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
        elif (call := next(of_class(kind, "__call__"), None)) is not None:
            function, owner = call, function
        else:
            break
    return None, None


def _scope(function: FunctionType, names: Collection[str]) -> Iterator[Any]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for name in names:
        try:
            if name in cells:
                yield cells[name].cell_contents
            elif name in function.__globals__:
                yield function.__globals__[name]
        except ValueError:  # it has no value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _taken(value: Any, names: Iterable[str]) -> list[Any]:
    """What it has under these names, and which modules its class has."""
    held, kind = _held(value), type(value)
    within = value if issubclass(kind, type) else kind
    parts = held.get("_modules", {}) if is_module(value) else {}
    found = [each[name] for each in (held, parts) for name in names if name in each]
    if kind is ModuleType:
        return [each for each in found if is_module(each)]
    for name in names:
        at = next(of_class(within, name), None)
        if is_module(at) and name not in held:
            found.append(at)
        elif type(at) is MemberDescriptorType and within is kind:
            try:
                found.append(at.__get__(value))
            except AttributeError:  # it has no value yet
                continue
    return found


def _methods(value: Any, names: Iterable[str]) -> list[tuple[Any, Any]]:
    above = None if "super" in names else 1
    return [(method, value) for name in names for method in islice(of_class(type(value), name), above)]


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


def of_class(kind: type, name: str) -> Iterator[Any]:
    """What a class of the program's, and those above it, have for their objects under a name."""
    return (vars(base)[name] for base in kind.__mro__ if name in vars(base) and _own(base))


def _own(of: Any) -> bool:
    """Whether a class or a function is of the program, not of torch's or Python's own."""
    return _home(of) not in ("torch", "builtins", "functools", "narrowgauge")


def _home(of: Any) -> str:
    """The package that a class or a function is of."""
    return str(getattr(of, "__module__", "")).partition(".")[0]
