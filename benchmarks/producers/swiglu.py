"""SwiGLU and its gradient, quantized before they leave the chip.

    y_MF    = silu(gate) up                     silu(g) = g s, s = 1 / (1 + e^-g)
    d_gate  = dy up s (1 + g (1 - s))           d_up = dy silu(g)

gate is the first half of gate_up's columns, up the second. Everything in float32; y, d_gate and d_up are rounded once,
to bfloat16. Formulas and their order are those that torch.compile takes apart `silu` and its backward into.

d(gate_up) [M, 2F] lies in memory as [2M, F] does, d_gate in its even rows and d_up in its odd ones; turned, [2F, M], it
is d_gate turned and then d_up turned. So each is stored as a tensor of its own, with one amax and one scale for both.

Bytes per element of y: 4 read, 2 written by the forward pass, 6 and 4 by the backward pass; made by one kernel and cast
by another it is 10 and 18.

Legend: M = tokens, F = columns of y, W = F / 2 words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from benchmarks.producers.pieces import (
    Launch,
    Made,
    Room,
    count_in,
    in_words,
    place,
    publish,
    read_given,
    sigmoid,
    to_words,
    write,
)
from torch import Tensor

from narrowgauge.compute.kernels.both import Given
from narrowgauge.compute.kernels.fused.rules import INTERPRETED
from narrowgauge.compute.kernels.fused.tile import BF16, high, load, low, tile_amax
from narrowgauge.compute.recipes import Operand
from narrowgauge.errors import ShapeError

FORWARD, BACKWARD = Launch(128, 64, 8, 64), Launch(128, 64, 8, 80)


@triton.jit
def _product(gate, up, INTERPRET: tl.constexpr):
    return gate * sigmoid(gate, INTERPRET) * up


@triton.jit
def _gradients(gate, up, dy, INTERPRET: tl.constexpr):
    s = sigmoid(gate, INTERPRET)
    return dy * up * s * (1.0 + gate * (1.0 - s)), dy * (gate * s)


@triton.jit
def _forward(
    gate_ptr, up_ptr, scale_ptr, inv_scale_ptr, high_ptr, plain_ptr, turned_ptr, out_ptr, slot_ptr, scratch_ptr,
    M, W, stride_m, MANTISSA: tl.constexpr, MAX: tl.constexpr, CODES: tl.constexpr, HIGH: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, SLOT: tl.constexpr,
    INTERPRET: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    m, w = place(tl.program_id(0), W, ROWS, WORDS)
    gate, _ = load(gate_ptr, m, w, M, 2 * W, W, stride_m, 1, BF16)
    up, _ = load(up_ptr, m, w, M, 2 * W, W, stride_m, 1, BF16)
    inv_scale, scale = read_given(scale_ptr, inv_scale_ptr, CODES)
    even = _product(low(gate, BF16), low(up, BF16), INTERPRET)
    y = to_words(even, _product(high(gate, BF16), high(up, BF16), INTERPRET), INTERPRET)
    before = count_in(tile_amax(y, y, BF16, INTERPRET), scratch_ptr)
    write(
        y, inv_scale, m, m, w, M, M, W, high_ptr, plain_ptr, turned_ptr, HIGH, PLAIN, TURNED, MANTISSA, MAX, INTERPRET
    )
    publish(before, scale, out_ptr, slot_ptr, scratch_ptr, CODES, SLOT)


@triton.jit
def _backward(
    gate_ptr, up_ptr, dy_ptr, scale_ptr, inv_scale_ptr, high_ptr, plain_ptr, turned_ptr, turned_up_ptr,
    out_ptr, slot_ptr, scratch_ptr, M, W, stride_m, stride_dy,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, CODES: tl.constexpr, HIGH: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, SLOT: tl.constexpr,
    INTERPRET: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    m, w = place(tl.program_id(0), W, ROWS, WORDS)
    gate, _ = load(gate_ptr, m, w, M, 2 * W, W, stride_m, 1, BF16)
    up, _ = load(up_ptr, m, w, M, 2 * W, W, stride_m, 1, BF16)
    dy, _ = load(dy_ptr, m, w, M, 2 * W, W, stride_dy, 1, BF16)
    inv_scale, scale = read_given(scale_ptr, inv_scale_ptr, CODES)
    even_gate, even_up = _gradients(low(gate, BF16), low(up, BF16), low(dy, BF16), INTERPRET)
    odd_gate, odd_up = _gradients(high(gate, BF16), high(up, BF16), high(dy, BF16), INTERPRET)
    d_gate, d_up = to_words(even_gate, odd_gate, INTERPRET), to_words(even_up, odd_up, INTERPRET)
    bits = tl.maximum(tile_amax(d_gate, d_gate, BF16, INTERPRET), tile_amax(d_up, d_up, BF16, INTERPRET))
    before = count_in(bits, scratch_ptr)
    write(
        d_gate, inv_scale, 2 * m, m, w, 2 * M, M, W, high_ptr, plain_ptr, turned_ptr,
        HIGH, PLAIN, TURNED, MANTISSA, MAX, INTERPRET,
    )  # fmt: skip
    write(
        d_up, inv_scale, 2 * m + 1, m, w, 2 * M, M, W, high_ptr, plain_ptr, turned_up_ptr,
        HIGH, PLAIN, TURNED, MANTISSA, MAX, INTERPRET,
    )  # fmt: skip
    publish(before, scale, out_ptr, slot_ptr, scratch_ptr, CODES, SLOT)


def swiglu_given(
    gate_up: Tensor, rule: Operand, given: Given, *,
    plain: bool = True, turned: bool = True, high: bool = False, launch: Launch = FORWARD,
) -> Made:  # fmt: skip
    """Codes of y = silu(gate) up under a given scale, and the amax of y, in one launch.

    Args:
        gate_up: [M, 2F] bfloat16, F even.
        rule: its format counts.
        given: scale, slot and scratch as for `tensorwise.cast_given`.
        plain, turned, high: whether to write codes [M, F], codes [F, M], and y itself.
        launch: how the work is cut.
    """
    return _run_forward(gate_up, rule, given, plain, turned, high, launch)


def swiglu_amax(gate_up: Tensor, *, launch: Launch = FORWARD) -> tuple[Tensor, Tensor]:
    """y = silu(gate) up, [M, F] bfloat16, and its amax []; gate_up as for `swiglu_given`."""
    made = _run_forward(gate_up, None, None, False, False, True, launch)
    assert made.high is not None
    return made.high, made.amax


def swiglu_grad_given(
    gate_up: Tensor, dy_MF: Tensor, rule: Operand, given: Given, *,
    plain: bool = True, turned: bool = True, high: bool = False, launch: Launch = BACKWARD,
) -> Made:  # fmt: skip
    """Codes of the gradient of gate_up under a given scale, and its amax, in one launch.

    Args:
        gate_up: [M, 2F] bfloat16, F even: what the forward pass read.
        dy_MF: bfloat16, the gradient of y.
        rule, given, plain, turned, high, launch: as for `swiglu_given`, of codes [M, 2F] and [2F, M].
    """
    return _run_backward(gate_up, dy_MF, rule, given, plain, turned, high, launch)


def swiglu_grad_amax(gate_up: Tensor, dy_MF: Tensor, *, launch: Launch = BACKWARD) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up, [M, 2F] bfloat16, and its amax []; arguments as for `swiglu_grad_given`."""
    made = _run_backward(gate_up, dy_MF, None, None, False, False, True, launch)
    assert made.high is not None
    return made.high, made.amax


def _run_forward(
    gate_up: Tensor, rule: Operand | None, given: Given | None, plain: bool, turned: bool, high: bool, launch: Launch
) -> Made:
    x = in_words(gate_up, "gate_up", 2)
    M, F = x.shape[0], x.shape[1] // 2
    room = Room(M, F, x, rule, given, plain, turned, high)
    _forward[_grid(M, F, launch)](
        x, x[:, F:], room.scale, room.inv_scale, room.high, room.plain, room.turned, room.out, room.slot, room.scratch,
        M, F // 2, x.stride(0) // 2, *room.facts, INTERPRETED, launch.rows, launch.columns // 2,
        num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return room.made()


def _run_backward(
    gate_up: Tensor, dy_MF: Tensor, rule: Operand | None, given: Given | None,
    plain: bool, turned: bool, high: bool, launch: Launch,
) -> Made:  # fmt: skip
    x, dy = in_words(gate_up, "gate_up", 2), in_words(dy_MF, "dy")
    M, F = x.shape[0], x.shape[1] // 2
    if dy.shape != (M, F):
        raise ShapeError(f"dy is {list(dy.shape)} and gate_up {list(x.shape)}; dy must be {[M, F]}, the shape of y.")
    room = Room(M, 2 * F, x, rule, given, plain, turned, high)
    _backward[_grid(M, F, launch)](
        x, x[:, F:], dy, room.scale, room.inv_scale, room.high, room.plain, room.turned,
        None if room.turned is None else room.turned[F:], room.out, room.slot, room.scratch,
        M, F // 2, x.stride(0) // 2, dy.stride(0) // 2, *room.facts, INTERPRETED, launch.rows, launch.columns // 2,
        num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return room.made()


def _grid(M: int, F: int, launch: Launch) -> tuple[int]:
    """One program per tile; one even of nothing, for someone has to write the amax."""
    return (max(1, triton.cdiv(M, launch.rows) * triton.cdiv(F, launch.columns)),)
