"""Which parameters a module has, told at once: torch's own way has a generator for each module in it.

It is asked where the program calls modules and `backward`, and is not kept: a module may get, lose or exchange
parameters at any time, and nobody tells of each of the ways to do that.
"""

from __future__ import annotations

from torch import nn

_Module = nn.Module  # a program's module may have its own word on what its parameters are
_parameters, _named_parameters = _Module.parameters, _Module.named_parameters
_named_modules, _named_members = _Module.named_modules, _Module._named_members
_WORDS = frozenset(("parameters", "named_parameters", "named_modules", "_named_members"))


def ids_of(module: nn.Module) -> set[int]:
    """The ids of its parameters, as they are now: by a few functions, where torch's own way has one for each module."""
    found = ids_in_tables(module)
    return {id(p) for p in module.parameters()} if found is None else found


def ids_in_tables(module: nn.Module) -> set[int] | None:
    """The same; None if a program's own word says which they are."""
    kind = type(module)
    plain = kind.parameters is _parameters and kind.named_parameters is _named_parameters
    if not plain or kind._named_members is not _named_members or not vars(module).keys().isdisjoint(_WORDS):
        return None
    found: set[int] = set()
    waiting, seen = [module], {id(module)}
    while waiting:
        each = waiting.pop()
        if type(each).named_modules is not _named_modules:
            return None
        found.update(map(id, each._parameters.values()))
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    found.discard(id(None))
    return found
