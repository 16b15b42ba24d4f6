"""Looks: where watched kernels leave their sums during a step, and how these become packed moments at its end.

    look = looks.open("blocks.0.wq:input", x, rule, turn)      room for the sums of one call
    cast(x, rule, amax, look=look)                             a watched kernel fills it
    sites, packed = looks.pack()                               [L, width] float64, one row per look, on the device
    looks.clear()                                              the next step begins

Nothing here waits for the device. A step that opens the same looks in the same order finds them at the same addresses,
so that a captured graph stays right; room for more is taken in chunks, which are never given back.

Legend: M = rows, K = columns, W = ceil(K / 2) words, L = looks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Again
from narrowgauge.compute.kernels.fused.watched import packing
from narrowgauge.compute.kernels.fused.watched.errors import ERRORS
from narrowgauge.compute.kernels.fused.watched.moments import FIELDS
from narrowgauge.compute.kernels.fused.watched.plan import (
    LINES,
    PLAIN_SQUARES,
    PLAIN_TILES,
    SQUARES,
    TENSOR,
    TILES,
    Plan,
    pieces,
    plain_lines,
)
from narrowgauge.compute.kernels.fused.watched.sampling import COUNTS, GROUP
from narrowgauge.compute.quant import BLOCK_1x128, BLOCK_128x128, PerRow, PerTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.errors import UsageError
from narrowgauge.metrics import MOMENTS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WALKS = {PerTensor(): TENSOR, PerRow(): LINES, BLOCK_1x128: TILES, BLOCK_128x128: SQUARES}  # by granularity
PLAIN_WALKS = {**WALKS, BLOCK_1x128: PLAIN_TILES, BLOCK_128x128: PLAIN_SQUARES}  # without turned codes
CHUNK = 1 << 20  # float64 numbers of room taken at once, at least
LOOKS = 4096  # headers
Lies = tuple[tuple[Any, ...], tuple[int, ...]]  # what a look is asked for, and the strides of its matrix


@dataclass(eq=False, slots=True)
class Look:
    """One call's place in the room.

    `own` and `amax`, float32 [], are for the scale and the amax of what is counted and not made. `scratch`, int32 [2],
    is zeros before and after a kernel that uses it; should two streams of a program have met in it, it is so again in
    the next step.
    """

    site: str
    plan: Plan
    header: Tensor
    room: Tensor
    rows: Tensor
    columns: Tensor
    counts: Tensor
    ratio: Tensor
    own: Tensor
    amax: Tensor
    scratch: Tensor
    words: list[int]
    end: tuple[int, int]  # chunk, and where in it the next look begins
    whole: bool  # one scale for the whole tensor
    numbers: tuple[int, ...] = ()  # of the plan, in this turn
    asked: tuple[Any, ...] = ()  # shape, dtype, rule and codes that it was opened for last
    again: Again | None = None  # the launches that filled it, for what lies so and has this given scale
    lies: Lies | None = None  # what was asked then, and the strides
    offset: int = 0  # the address modulo 16
    given: ref[Any] | None = None
    failed: bool = False  # whoever was to fill it could not

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where the kernel writes."""
        return self.room, self.rows, self.columns, self.counts


@dataclass
class Looks:
    """The room of one device's looks.

    Args:
        device: where it is.
    """

    device: torch.device
    _chunks: list[Tensor] = field(default_factory=list)
    _open: list[Look] = field(default_factory=list)
    _known: list[Look] = field(default_factory=list)  # looks by order, from steps before
    _place: tuple[int, int] = (0, 0)  # chunk, and how much of it is taken
    _headers: Tensor | None = None
    _neutral: Tensor | None = None
    _numbers: Tensor | None = None  # own, amax, scratch of each look
    _kept: list[Tensor] = field(default_factory=list)
    _turn: int = -1
    _in_turn: dict[int, tuple[int, ...]] = field(default_factory=dict)  # numbers of looks, by the ids of their plans

    def open(self, site: str, x_MK: Tensor, rule: Operand, turn: int, turned: bool = True) -> Look | None:
        """Room for the sums of one call, which makes `turned` codes or none; None for what no watched kernel can do."""
        order, asked = len(self._open), asked_of(x_MK, rule, turned)
        look = self._known[order] if order < len(self._known) else None
        if look is None or look.asked != asked:  # a step mostly asks as the one before did
            if not _can(x_MK, rule):
                return None
            M, K = x_MK.shape
            walk = (WALKS if turned else PLAIN_WALKS)[rule.granularity]
            if walk == LINES and not turned:
                walk = plain_lines(K)
            plan, whole = Plan.of(M, K, walk), rule.granularity == PerTensor()
            if look is None or look.plan != plan or look.whole != whole:
                look = self._new(plan, order, whole)
            look.asked, look.again, look.lies = asked, None, None
        self._take_up(look, site, turn)
        return look

    def open_again(self, site: str, lies: Lies, place: int, given: Any, turn: int) -> Look | None:
        """The next look with launches that fill it, if it was filled by what lay so before; else None.

        Whoever fills it says then that it has not failed.
        """
        try:
            look = self._known[len(self._open)]
        except IndexError:
            return None
        if look.again is None or look.offset != place & 15 or not (look.lies is lies or look.lies == lies):
            return None  # the launches that filled it last would fill it from elsewhere
        if given is not look.given if look.given is None else given is None or given is not look.given():
            return None
        numbers = self._in_turn.get(id(look.plan)) if turn == self._turn else None
        look.numbers = self._numbers_of(look.plan, turn) if numbers is None else numbers
        look.site, look.failed, look.lies = site, True, lies  # from now on the same object
        self._open.append(look)
        return look

    def _take_up(self, look: Look, site: str, turn: int) -> None:
        look.site, look.failed, look.numbers = site, False, self._numbers_of(look.plan, turn)
        self._open.append(look)

    def _numbers_of(self, plan: Plan, turn: int) -> tuple[int, ...]:
        """samples, errors, lines, segments; first, stride, number of sampled rows; share and phase of compared ones."""
        if turn != self._turn:
            self._turn, self._in_turn = turn, {}
        numbers = self._in_turn.get(id(plan))
        if numbers is None:
            samples, errors, lines, segments, stride, sampled, share = plan.numbers
            numbers = samples, errors, lines, segments, turn % stride, stride, sampled, share, turn % share
            self._in_turn[id(plan)] = numbers
        return numbers

    def pack(self) -> tuple[list[str], Tensor]:
        """The sites of all open looks that did not fail, in order, and their packed moments [L, width] float64."""
        if self._neutral is None:
            self._neutral = torch.from_numpy(MOMENTS.empty()).to(self.device)
        count = len(self._open)
        out = self._neutral.expand(count, MOMENTS.width).clone()
        if count:
            parts = torch.empty(count, packing.PARTS, packing.FIELDS, dtype=torch.float64, device=self.device)
            packing.parts[(count, packing.PARTS)](self._headers, parts, packing.WORDS, 1024, num_warps=8)
            packing.heads[(count,)](
                self._headers, parts, out, MOMENTS.width, packing.WORDS, packing.PARTS, 1024, 16, num_warps=8
            )
            packing.lines[(count, packing.LINE_PROGRAMS)](
                self._headers, out, MOMENTS.width, packing.WORDS, 512, num_warps=4
            )
        if any(look.failed for look in self._open):
            filled = [at for at, look in enumerate(self._open) if not look.failed]
            return [self._open[at].site for at in filled], out[filled]
        return [look.site for look in self._open], out

    def clear(self) -> None:
        """Begin the next step."""
        if self._open and self._numbers is not None:
            self._numbers.zero_()
        self._open = []

    def reserve(self, numbers: int) -> None:
        """Take room for so many float64 numbers more; to be called before a graph is captured."""
        before = self._place
        self._take(numbers)
        self._place = before

    def _new(self, plan: Plan, order: int, whole: bool) -> Look:
        if order >= LOOKS:
            raise UsageError(f"a step has room for {LOOKS} looks, and this is one more; watch fewer microbatches.")
        # What stood here and behind was of another shape: from here on, the room is given anew.
        del self._known[order:]
        self._place = self._known[-1].end if self._known else (0, 0)
        at = FIELDS * plan.programs + ERRORS * plan.errors + GROUP * plan.samples
        doubles = (at + 2) // 2 * 2  # one more for the ratio
        sizes = (2 * plan.segments * plan.lines, 2 * plan.bands * plan.K, COUNTS * plan.samples)
        halves = [pieces(size, 4) * 2 for size in sizes]
        room = self._take(doubles + sum(halves))
        parts = room[doubles:].split(halves)
        rows, columns, counts = parts[0].view(torch.float32), parts[1].view(torch.float32), parts[2].view(torch.int32)
        if self._headers is None:
            self._headers = torch.zeros(LOOKS, packing.WORDS, dtype=torch.int64, device=self.device)
        if self._numbers is None:
            self._numbers = torch.zeros(LOOKS, 4, dtype=torch.float32, device=self.device)
        own, amax = self._numbers[order, :2].unbind()
        scratch = self._numbers[order, 2:].view(torch.int32)
        words = [plan.programs, plan.errors, plan.samples, plan.lines, plan.segments, plan.bands, plan.K, int(whole), 0]
        words += [part.data_ptr() for part in (room, rows, columns, counts)]
        words += [0] * (packing.WORDS - len(words))
        look = Look(
            "", plan, self._headers[order], room, rows, columns, counts, room[at : at + 1], own, amax, scratch, words,
            self._place, whole,
        )  # fmt: skip
        self._write(look)
        self._known.append(look)
        return look

    def _write(self, look: Look) -> None:
        """The header, once; its source stays, for a captured graph copies from it again."""
        words = torch.tensor(look.words, dtype=torch.int64, device="cpu")
        if self.device.type == "cuda":
            words = words.pin_memory()
            self._kept.append(words)
        look.header.copy_(words, non_blocking=True)

    def _take(self, numbers: int) -> Tensor:
        chunk, taken = self._place
        while chunk < len(self._chunks) and taken + numbers > len(self._chunks[chunk]):
            chunk, taken = chunk + 1, 0
        if chunk == len(self._chunks):
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    "a look needs more room while a CUDA graph is being captured; run the same step once before."
                )
            self._chunks.append(torch.zeros(max(CHUNK, numbers), dtype=torch.float64, device=self.device))
        self._place = (chunk, taken + numbers)
        return self._chunks[chunk][taken : taken + numbers]


def asked_of(x_MK: Tensor, rule: Operand, turned: bool) -> tuple[Any, ...]:
    """What a look is asked for."""
    return x_MK.shape, x_MK.dtype, rule, turned


def _can(x_MK: Tensor, rule: Operand) -> bool:
    known = rule.granularity in WALKS and rule.scaling.e8m0 is None
    return known and x_MK.dtype in DTYPES and x_MK.numel() > 0
