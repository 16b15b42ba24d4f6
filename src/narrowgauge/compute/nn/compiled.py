"""The linear layer under torch.compile: two operators that the compiler sees, and does not look into.

    linear_forward    x, w, b, handle         -> y, and what the backward pass needs
    linear_backward   dy, w, codes_xT, ...    -> dx, dw, db

So a graph has no break at a layer, and what changes from step to step (scales, who watches, a weight's kept codes) is
read when the operator runs, not when it is traced: nothing is compiled again. The operators run `gemms` and `operands`
as the eager function does; `handle` tells them whose they are.

The compiler does what it does best (`in_graph`): the amax of a tensor is made where the tensor is made, and x's codes
for wgrad may be left to it. It then decides whether to keep x, or to make it once more from what is kept anyway.

    CODES      saved: codes of x, one byte per element; both copies came from one read      the fastest
    REMADE     saved: what the compiler chooses; x is made once more, and its codes          the least memory

Codes under one scale the graph makes where it makes x. Where every line has a scale, a graph would make x twice, for
the amaxes and for the codes; so there it writes x, and `turned_codes` reads it.

w is quantized again for dgrad, which costs one more read of it and saves a byte per parameter from forward to backward.
Where a step has several microbatches, both copies are kept anyway (`kept_weight`).

A forward that runs inside a backward pass was recomputed by the compiler or a checkpoint. What it saves replaces what
the first one saved, so nothing tells which of the two a backward belongs to. But if a recorded forward still waits for
its backward, this is the same once more, and not recorded again; if none does, the first ran without grad (reentrant
checkpointing), and this is the one to record.

Legend: M = tokens (all leading dimensions), K = input features, N = output features; T = transposed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.compute.nn import gemms
from narrowgauge.compute.nn.call import Call, Mode, without_autocast
from narrowgauge.compute.nn.observer import Samples
from narrowgauge.compute.nn.once import TWICE
from narrowgauge.compute.nn.operands import quantize_operand
from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.switched import switched_forward
from narrowgauge.compute.nn.tracing.capture import capturing
from narrowgauge.compute.nn.tracing.handle import layer_of
from narrowgauge.compute.nn.tracing.in_graph import CODES, Traced, amax_of, codes_of, inv_scale_of, remade
from narrowgauge.compute.nn.tracing.operator import derivative_of, operator, shapes_of
from narrowgauge.compute.nn.tracing.revision import REVISION
from narrowgauge.compute.nn.turned_codes import codes_like, flat, turned_codes, unflat
from narrowgauge.compute.quant import QTensor

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, dtype: torch.dtype) -> Tensor:
    """`fp8_linear` for a compiler's eyes; `dtype` is the result's."""
    grad = torch.is_grad_enabled()
    if state.keeps_high:
        y_high: Tensor = switched_forward(x, weight, bias, state.handle, dtype, grad, REVISION)
        return y_high
    traced = state.traced
    amax = amax_of(x) if traced.own_scale else None
    y: Tensor = linear_forward(x, amax, weight, bias, state.handle, dtype, grad, *traced.numbers)[0]
    return y


@operator
def linear_forward(
    x: Tensor,
    amax: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    dtype: torch.dtype,
    grad: bool,
    whole: list[int],
    real: list[float],
) -> Forward:
    """y [..., N] in `dtype`, and if `grad` what the backward pass needs, each empty where it does not.

    That is: codes [K, M] of x; their scales in a row, or the only one; the inv_scale [] of x, where codes are left to
    the graph and it cannot know it; the amax [] of w, where that makes its scale. Where the graph makes scales too, one
    number stands for them.
    """
    state: LayerState = layer_of(handle)
    saves, own_scale, by_lines = whole[0], bool(whole[1]), bool(whole[4])
    recomputed, captured = inside_backward(), capturing(x)
    state.calls += 1
    if not recomputed:
        state.clock.catch_up()
    mode: Mode = "read"
    if grad:
        mode = "note" if recomputed and state.waits else "write"  # notes are for a backward, and none will ask here
    x_MK = gemms.matrix(x)
    if grad:
        state.rows_seen = x_MK.shape[0]
        state.kept_weight.begin()
    call = Call.begin(state, dtype, mode, captured)
    nothing: Tensor | None = None
    codes = scale = inv_scale = amax_w = nothing
    with without_autocast(x.device.type):
        q_x = quantize_operand(call, "input", x_MK, True, grad and saves == CODES, amax)
        q_w = quantize_operand(call, "weight", weight, True, False)
        assert q_x.plain is not None  # both plain copies are always asked for
        assert q_w.plain is not None
        y_MN = gemms.fprop(call, q_x.plain, q_w.plain, bias, (x_MK, weight))
    if grad:
        if q_x.turned is not None:
            codes, scale = q_x.turned.codes.contiguous(), flat(q_x.turned.scale)
        elif by_lines:
            scale = x.new_empty(1, dtype=torch.int32)  # read by nobody; as float32 it might be NaN
        else:
            scale = q_x.plain.scale
            inv_scale = None if own_scale else q_x.inv_scale_used()
        if own_scale:
            amax_w = q_w.amax
        if mode == "write":
            state.wait(1)
        state.clock.saw_data()
        if captured:
            state.clock.captured()
        _keep_samples(call, scale, gemms.keep_samples(call, x_MK, weight))
    y = gemms.leading(y_MN, x)
    codes, scale, inv_scale, amax_w = (  # each of its own memory
        x.new_empty(0) if found is None else found for found in (codes, scale, inv_scale, amax_w)
    )
    return y, codes, scale, inv_scale, amax_w


@shapes_of(linear_forward)
def _(
    x: Tensor,
    amax: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    dtype: torch.dtype,
    grad: bool,
    whole: list[int],
    real: list[float],
) -> Forward:
    traced = Traced(whole, real)
    y, nothing, one = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype), x.new_empty(0), ()
    if not grad:
        return y, nothing, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    amax_w = x.new_empty(one, dtype=torch.float32) if traced.own_scale else x.new_empty(0)
    if traced.saves != CODES:
        lines = traced.by_lines
        scale = x.new_empty(1 if lines else one, dtype=torch.int32 if lines else torch.float32)
        known = traced.own_scale or traced.by_lines
        inv_scale = x.new_empty(0) if known else x.new_empty(one, dtype=torch.float32)
        return y, nothing, scale, inv_scale, amax_w
    codes, scale = codes_like(x, (math.prod(x.shape[:-1]), x.shape[-1]), traced)
    return y, codes, scale, x.new_empty(0), amax_w


@operator
def linear_backward(
    dy: Tensor,
    amax: Tensor | None,
    x_like: list[int],
    x_dtype: torch.dtype,
    weight: Tensor,
    amax_w: Tensor,
    bias_dtype: torch.dtype | None,
    codes_xT: Tensor,
    scale_xT: Tensor,
    mark: Tensor,
    room: Tensor | None,
    handle: Tensor,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db, each empty if not among `needs`; `mark` is what the forward pass gave for scales.

    Nothing is done with `room`.
    """
    state: LayerState = layer_of(handle)
    call = Call.begin(state, dtype, "write", capturing(dy))
    again = Call(state, dtype, "again", False, call.turn, None)
    state.wait(-1)
    samples = state.samples.pop((call.turn, mark.data_ptr()), None)
    dy_MN = gemms.matrix(dy)
    dx = dw = db = None
    needs_dx, needs_dw, needs_db = needs
    with without_autocast(dy.device.type):
        q_dy, q_dyT, *_ = quantize_operand(call, "grad_output", dy_MN, needs_dx, needs_dw, amax)
        if q_dy is not None:
            q_w = quantize_operand(again, "weight", weight, False, True, amax_w if amax_w.numel() else None)
            assert q_w.turned is not None
            dx = gemms.dgrad(call, q_dy, q_w.turned, x_dtype, dy_MN, samples)
            dx = dx if len(x_like) == 2 else dx.view(x_like)
            del q_dy, q_w  # before dw takes room: here memory is at its peak
        if q_dyT is not None:
            rule = state.recipe.uses("input")[1]
            shape = rule.granularity.scale_shape((codes_xT.shape[0], codes_xT.shape[1]))
            q_xT = QTensor.unchecked(codes_xT, unflat(scale_xT, shape), rule.fmt, rule.granularity)
            dw = gemms.wgrad(call, q_dyT, q_xT, weight.dtype, dy_MN, samples)
        if needs_db and bias_dtype is not None:
            db = gemms.bias_gradient(dy_MN, bias_dtype)
    state.clock.saw_data()
    dx = dy.new_empty(0, dtype=x_dtype) if dx is None else dx
    dw = dy.new_empty(0, dtype=weight.dtype) if dw is None else dw
    return dx, dw, dy.new_empty(0, dtype=bias_dtype or dy.dtype) if db is None else db


@shapes_of(linear_backward)
def _(
    dy: Tensor,
    amax: Tensor | None,
    x_like: list[int],
    x_dtype: torch.dtype,
    weight: Tensor,
    amax_w: Tensor,
    bias_dtype: torch.dtype | None,
    codes_xT: Tensor,
    scale_xT: Tensor,
    mark: Tensor,
    room: Tensor | None,
    handle: Tensor,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx = dy.new_empty(x_like if needs[0] else 0, dtype=x_dtype)
    dw = dy.new_empty(tuple(weight.shape) if needs[1] else 0, dtype=weight.dtype)
    return dx, dw, dy.new_empty(dy.shape[-1] if needs[2] else 0, dtype=bias_dtype or dy.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    x, amax, weight, bias, handle, ctx.dtype, _, *numbers = inputs
    _, codes, scale, inv_scale, amax_w = output
    ctx.traced = Traced(*numbers)
    high = () if ctx.traced.saves == CODES else (x, inv_scale if amax is None else amax)
    if not ctx.needs_input_grad[2]:  # a frozen weight needs no x
        codes = codes.new_empty(0)
    ctx.save_for_backward(weight, amax_w, codes, scale, handle, *high)
    ctx.x_like, ctx.x_dtype = list(x.shape), x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(codes, scale, inv_scale, amax_w)


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, amax_w, codes, mark, handle, *high = ctx.saved_tensors
    scale, room = mark, None
    needs = [bool(ctx.needs_input_grad[i]) for i in (0, 2, 3)]
    if high and needs[1]:
        x, known = high
        x_MK = x.reshape(-1, x.shape[-1])
        if ctx.traced.by_lines:
            # Codes of dy, twice, and of w; all of it twice, because the compiler counts twice what is read in halves.
            needed = 2 * weight.shape[0] * (2 * x_MK.shape[0] + weight.shape[1])
            codes, scale, room = turned_codes(remade(x_MK), handle, *ctx.traced.numbers, needed)
        else:
            inv_scale = inv_scale_of(known, ctx.traced) if ctx.traced.own_scale else known
            codes = codes_of(x_MK, inv_scale, ctx.traced).t().contiguous()
    amax = amax_of(dy) if ctx.traced.own_scale else None
    weights = (weight, amax_w, ctx.bias_dtype)
    found = linear_backward(
        dy, amax, ctx.x_like, ctx.x_dtype, *weights, codes, scale, mark, room, handle, ctx.dtype, needs
    )  # fmt: skip
    dx, dw, db = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return dx, None, dw, db, *5 * (None,)


def _twice(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(TWICE)


derivative_of(linear_forward, _differentiate, _save)
derivative_of(linear_backward, _twice, lambda ctx, inputs, output: None)


def _keep_samples(call: Call, mark: Tensor, samples: Samples) -> None:
    """Until its backward pass, which will be given the same mark. What no backward came for goes with its step."""
    kept = call.state.samples
    for turn, address in [key for key in kept if key[0] != call.turn]:
        del kept[turn, address]
    if samples is not None:
        kept[call.turn, mark.data_ptr()] = samples
