"""Which names a code reads, and whether it hands its object on, by its instructions.

Each version of Python has other instructions, one for two loads among them: `dis` tells what a new one is about (a
name, a variable) and what it leaves on the stack, so few are named here.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterator
from functools import lru_cache
from inspect import CO_VARARGS
from types import CodeType

_CELLS = {opcode for name, opcode in dis.opmap.items() if "DEREF" in name}  # 3.14 counts some as local
_NAMES = _CELLS | set(dis.hasname)
_NO_STEP = "COPY", "EXTENDED_ARG"  # between what is loaded and what is done with it
_ITSELF = {"eval", "requires_grad_", "train"}  # return the module, which may then be called
# What is asked of a module beside its call: by a penalty of its weights, an average of them, or for its mode.
_UNCALLED = {"buffers", "named_buffers", "named_parameters", "parameters", "state_dict", "training", "zero_grad"}
_UNCALLED |= _ITSELF


@lru_cache(1024)  # what is called without gradients is asked for at each call
def names_of(code: CodeType) -> tuple[str, ...]:
    """What it reads, in that order, but for what it only asks for its parameters, say."""
    read = [load for each in _codes(code) for load in _loads(each, _NAMES)]
    return tuple(dict.fromkeys(name for name, then in read if _attribute(_item(then)) not in _UNCALLED))


@lru_cache(1024)
def hands_on(code: CodeType) -> bool:
    """Whether a method does anything with its object but read and write its attributes."""
    if code.co_argcount:
        return any(not _attribute(then) for then in _uses(code, code.co_varnames[0]))
    if not code.co_flags & CO_VARARGS:
        return False
    for then in _uses(code, code.co_varnames[code.co_kwonlyargcount]):  # it is the first of `*args`
        key, rest = then[0].argval, _item(then)
        if rest is then or not isinstance(key, int) or (key == 0 and not _attribute(rest)):
            return True
    return False


def _uses(code: CodeType, own: str) -> Iterator[list[dis.Instruction]]:
    """What follows each load of a variable of its own."""
    for each in _codes(code):
        kinds = _CELLS if each is not code or own in code.co_cellvars else dis.haslocal
        yield from (then for name, then in _loads(each, kinds) if name == own)


def _loads(code: CodeType, kinds: Collection[int]) -> Iterator[tuple[str, list[dis.Instruction]]]:
    """What it loads of these kinds, and the steps from there on."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEP]
    for at, step in enumerate(steps):
        if step.opcode in kinds and "LOAD" in step.opname:
            *below, top = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if not step.opname.startswith("STORE"):  # else it stores the first
                yield from ((name, steps[at:]) for name in below)
            yield top, steps[at + 1 :]


def _item(then: list[dis.Instruction]) -> list[dis.Instruction]:
    """The steps after an item was taken of what was loaded, if that is what follows."""
    rest = _done(then)
    return rest if then[len(then) - len(rest) - 1].opname.startswith("BINARY_") else then


def _attribute(then: list[dis.Instruction]) -> str:
    """The attribute that is read or written of what was loaded; "" if it is used itself, as by a method's return."""
    if not then or not ("ATTR" in then[0].opname or then[0].opname == "LOAD_METHOD"):
        return ""
    name: str = then[0].argval
    dropped = name not in _ITSELF or [step.opname for step in _done(then)[:1]] == ["POP_TOP"]
    return name if dropped else ""


def _done(steps: list[dis.Instruction]) -> list[dis.Instruction]:
    """The steps from where there is no more on the stack than at first: an item was taken, a method was called."""
    depth = 0
    for at, step in enumerate(steps):
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth <= 0:
            return steps[at + 1 :]
    return []


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and what is defined in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
