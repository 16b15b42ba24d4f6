"""Products that no module tells of: functions of torch's, called with a parameter.

    F.linear(x, w)                  an attention's packed weight, a tied embedding, a layer's own forward
    x @ w, mm, bmm, addmm, einsum   weights that lie the other way, experts side by side
    torch._grouped_mm               experts by their tokens (F.grouped_mm calls it)
    F.conv1d, 2d, 3d, transposed    see `convolution`; torch.conv1d, ... are the same

While a recorded step runs, each of these names leads to a function that calls torch's own and then tells what was
multiplied, if one of the two is made of a parameter. Afterwards torch is as it was found, and so it is meanwhile, as
often as somebody needs it (`aside`). A function that a program took out of torch before (`from torch.nn.functional
import linear`) is not heard: its parameters are in the census.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.session.doors.hearing import unreal
from narrowgauge.session.doors.overridden import overridden
from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.sites.convolution import image_turns, of_images
from narrowgauge.session.sites.einsum import turns_of
from narrowgauge.session.sites.laid import laid_as
from narrowgauge.session.sites.origin import Origin, origin
from narrowgauge.session.sites.part import Part, Turn, rows
from narrowgauge.session.sites.pieces import Pieces
from narrowgauge.session.sites.stand_in import StandIn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Candidate:
    """Two tensors that were multiplied, one of them perhaps a weight.

    `axis` is the axis of `w` that is contracted. Without one `w_rows` says how w lies.
    """

    x: Any
    w: Any
    axis: int | None = -1
    x_rows: Turn = rows
    w_rows: Turn = rows
    dy_rows: Turn = rows

    @cached_property
    def source(self) -> Origin | None:
        """What parameter `w` is made of, looked for once."""
        return origin(self.w)

    def part(self, y: Tensor) -> Part | None:
        """The product, if `w` is made of a parameter."""
        if not (isinstance(self.x, Tensor) and isinstance(self.w, Tensor)) or self.w.dim() < 2:
            return None
        source = self.source
        if source is None or source.parameter.dim() < 2:
            return None
        p = source.parameter
        turn = self.w_rows
        if self.axis is not None:
            turn = _turn(p, self.w, source.turned, self.axis)
        else:
            lay = laid_as(p, self.w, source.turned)
            if lay is None:
                return None
            turn = partial(_laid, lay=lay, turn=turn)
        return Part(self.x, p, y, self.x_rows, turn, self.dy_rows)

    def vector(self) -> Tensor | None:
        """The vector of which `w` is a piece, laid as a matrix: what several weights share has no rows of its own."""
        if not isinstance(self.w, Tensor) or self.w.dim() < 2 or min(self.w.shape[-2:]) < 2:
            return None
        source = self.source
        if source is None or source.parameter.dim() != 1:
            return None
        # FSDP1's is of another class: the layers that it was made of tell of themselves.
        return source.parameter if type(source.parameter) is Parameter else None


def _turn(p: Tensor, w: Tensor, turned: bool, axis: int) -> Turn:
    """How parameter `p`, of which `w` contracted along `axis` is made, becomes [N, K] or [E, N, K]."""
    if p.dim() != w.dim() and p.numel() == w.numel() and not turned:  # a kernel of taps as one matrix, say
        return partial(_lay, shape=w.shape, axis=axis)
    here = -3 - axis if turned else axis
    if p.shape[here] != w.shape[axis] and p.shape[-3 - here] == w.shape[axis]:
        here = -3 - here
    return partial(_lay, shape=None, axis=here)


def _lay(p: Tensor, shape: torch.Size | None, axis: int) -> Tensor:
    w = p if shape is None else p.reshape(shape)
    w = w if axis == -1 else w.transpose(-1, -2)
    return w if w.dim() <= 3 else w.flatten(0, -3)


def _laid(p: Tensor, lay: Turn, turn: Turn) -> Tensor:
    return turn(lay(p))


def _turned_rows(x: Tensor) -> Tensor:
    return rows(x.transpose(-1, -2))


def _pick(call: Arguments, place: int, *names: str) -> Any:
    args, kwargs = call
    return args[place] if len(args) > place else next((kwargs[n] for n in names if n in kwargs), None)


def linear(call: Arguments) -> Iterator[Candidate]:
    """x [..., K] times w [N, K]."""
    yield Candidate(_pick(call, 0, "input"), _pick(call, 1, "weight"))


def matmul(call: Arguments, first: int = 0) -> Iterator[Candidate]:
    """a [..., M, K] times b [..., K, N]: the weight is b; or else a, and all lies turned."""
    a = (
        _pick(call, first, "input", "mat1", "batch1", "self", "mat_a")
        if not first
        else _pick(call, 1, "mat1", "batch1")
    )
    b = _pick(call, first + 1, "other", "mat2", "batch2", "mat_b")
    yield Candidate(a, b, axis=-2)
    if isinstance(b, Tensor) and b.dim() >= 2:
        yield Candidate(b, a, axis=-1, x_rows=_turned_rows, dy_rows=_turned_rows)


def einsum(call: Arguments) -> Iterator[Candidate]:
    """Two tensors by an equation; the second is the weight if both are made of parameters."""
    args = call[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(operands) != 2 or not isinstance(args[0], str):
        return
    for weight in (1, 0):
        turns = turns_of(args[0], weight=weight)
        if turns is not None:
            yield Candidate(operands[1 - weight], operands[weight], None, *turns)


def convolution(call: Arguments, dims: int, transposed: bool) -> Iterator[Candidate]:
    """An image and its taps."""
    groups = _pick(call, 6, "groups") or 1
    turns = image_turns(dims, groups, transposed)
    yield Candidate(_pick(call, 0, "input"), _pick(call, 1, "weight"), None, *turns)


_FUNCTIONS: tuple[tuple[Any, str, Callable[[Arguments], Iterable[Candidate]]], ...] = (
    (F, "linear", linear),
    (torch, "_grouped_mm", matmul),
    (torch, "einsum", einsum),
    *((owner, name, matmul) for owner in (torch, Tensor) for name in ("matmul", "mm", "bmm")),
    *((owner, name, partial(matmul, first=1)) for owner in (torch, Tensor) for name in ("addmm", "baddbmm")),
    (Tensor, "__matmul__", matmul),
    *(
        (owner, f"{name}{n}d", partial(convolution, dims=n, transposed=name == "conv_transpose"))
        for owner in (F, torch)
        for name in ("conv", "conv_transpose")
        for n in (1, 2, 3)
    ),
)

_CHANGING = threading.RLock()  # what stands in torch's places; nobody forks meanwhile, or it would be held for good
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_CHANGING.acquire, after_in_parent=_CHANGING.release, after_in_child=_CHANGING.release)


class Products:
    """Hears products between `open` and `close`.

    Args:
        heard: told of a product with a parameter, or (then with False) of one by `F.linear` or a convolution whose
            weight is made of several tensors.
        failed: told of an error of ours; none reaches the program.
        told: whether somebody tells of what this thread multiplies now; then nothing is looked into.
        vector: told of a parameter that lies as a vector, and was multiplied as a matrix: it has no rows.
    """

    def __init__(
        self,
        heard: Callable[[Part, bool], None],
        failed: Callable[[str, Exception], None],
        told: Callable[[], bool] = lambda: False,
        vector: Callable[[Tensor], None] = lambda parameter: None,
    ) -> None:
        self._heard, self._failed, self._told, self._vector = heard, failed, told, vector
        self._open = self._listening = False
        self._asides: list[int] = []  # the thread of each
        self._pieces, self._steps = Pieces(), 0
        self._mine = threading.local()  # whether this thread is inside a product, or telling of one
        # For each function what took its place; and now: where, what, and what was there.
        self._ours: list[StandIn | None] = [None] * len(_FUNCTIONS)
        self._put: list[tuple[Any, str, StandIn, Any]] = []

    def open(self) -> None:
        """Listen."""
        self._open = True
        self._steps += 1
        self._settle()

    def close(self) -> None:
        """Leave torch as it was found, and what the program has put there meanwhile where it is."""
        self._open = False
        self._settle()

    def aside(self) -> Callable[[], None]:
        """Have torch as it was found until what is returned is called, on whichever thread."""
        thread = threading.get_ident()
        self._change(self._asides.append, thread)
        return partial(self._change, self._asides.remove, thread)

    def elsewhere(self) -> bool:
        """Whether another thread has it so."""
        here = threading.get_ident()
        return any(thread != here for thread in self._asides)

    def _change(self, change: Callable[[int], None], thread: int) -> None:
        with _CHANGING:
            change(thread)
            self._settle()

    def _settle(self) -> None:
        with _CHANGING:
            listening = self._open and not self._asides
            if listening != self._listening:
                self._listening = listening
                (self._put_ours if listening else self._put_back)()

    def _put_ours(self) -> None:
        for number, (owner, name, read) in enumerate(_FUNCTIONS):
            found = getattr(owner, name, None)
            if found is None:
                continue
            ours = self._ours[number]
            if ours is None or ours.__wrapped__ is not found:  # the program may have put its own there since
                ours = self._ours[number] = StandIn(found, owner, name)
            ours.call = partial(self._called, found, name, read)
            self._put.append((owner, name, ours, owner.__dict__.get(name)))
            setattr(owner, name, ours)

    def _put_back(self) -> None:
        while self._put:
            owner, name, ours, before = self._put.pop()
            ours.call = None
            if owner.__dict__.get(name) is not ours:
                continue
            if before is None:  # a method that Tensor inherits
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    @unseen
    def _called(
        self,
        original: Callable[..., Any],
        name: str,
        read: Callable[[Arguments], Iterable[Candidate]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if overridden(args, kwargs):  # the program's `__torch_function__` is told of torch's functions
            back = self.aside()
            try:
                y = original(*args, **kwargs)
            finally:
                back()
            if not getattr(self._mine, "busy", False) and not self._told():
                unseen_by_modes(self._tell, name, (args, kwargs), read, y)
            return y
        if getattr(self._mine, "busy", False) or self._told():
            return original(*args, **kwargs)
        self._mine.busy = True
        try:
            y = original(*args, **kwargs)
            unseen_by_modes(self._tell, name, (args, kwargs), read, y)
        finally:
            self._mine.busy = False
        return y

    def _tell(self, name: str, call: Arguments, read: Callable[[Arguments], Iterable[Candidate]], y: Any) -> None:
        if not isinstance(y, Tensor) or unreal():
            return
        try:
            for candidate in read(call):
                part = candidate.part(y)
                if part is not None:
                    w = part.w
                    # Experts lie in one parameter as well, and each has its own tokens.
                    if w is not None and (w.dim() == 2 or of_images(part)):
                        part.x = None if self._pieces.again(part.x, candidate.w, w, self._steps) else part.x
                    self._heard(part, True)
                    return
                if (parameter := candidate.vector()) is not None:
                    self._vector(parameter)
                if name.startswith(("linear", "conv")):
                    self._unknown(candidate, y)
        except Exception as error:
            self._failed(f"a product by {name}", error)

    def _unknown(self, candidate: Candidate, y: Tensor) -> None:
        x, w = candidate.x, candidate.w
        if isinstance(x, Tensor) and isinstance(w, Tensor):
            self._heard(Part(x, w, y, candidate.x_rows, candidate.w_rows, candidate.dy_rows), False)
