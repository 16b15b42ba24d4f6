"""The linear layer under torch.compile: two operators that the compiler sees, and does not look into.

    linear_forward    x, w, b, handle         -> y, codes_xT, scale_xT
    linear_backward   dy, w, codes_xT, ...    -> dx, dw, db

So a graph has no break at a layer, and what changes from step to step (scales, who watches, a weight's kept codes) is
read when the operator runs, not when it is traced: nothing is compiled again. The operators run `gemms` and `operands`
as the eager function does.

**What is saved** for the backward pass are FP8 codes of x; w is quantized again for dgrad, which costs one more read of
it and saves a byte per parameter from forward to backward. Where a step has several microbatches, both copies are kept
anyway (`kept_weight`).

A forward that runs inside a backward pass was recomputed by the compiler or a checkpoint; it is not observed again.

Legend: M = tokens (all leading dimensions), K = input features, N = output features; T = transposed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.compute.nn import gemms
from narrowgauge.compute.nn.call import Call, without_autocast
from narrowgauge.compute.nn.clock import inside_backward
from narrowgauge.compute.nn.handle import CODES, INPUT_AND_AMAX, granularity_of, layer_of
from narrowgauge.compute.nn.observer import Samples
from narrowgauge.compute.nn.operands import quantize_operand
from narrowgauge.compute.quant import PerTensor, QTensor

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, dtype: torch.dtype) -> Tensor:
    """`fp8_linear` for a compiler's eyes; `dtype` is the result's."""
    grad = torch.is_grad_enabled()
    amax = _amax_in_graph(x) if state.amax_in_graph else None
    y: Tensor
    y, _, _ = linear_forward(x, amax, weight, bias, state.handle, dtype, state.grain, grad, state.saves)
    return y


def _amax_in_graph(x: Tensor) -> Tensor:
    """max |x| in the compiler's own operations, which it merges with what made x; exact: it reads x's rounded bits."""
    integers = torch.int16 if x.element_size() == 2 else torch.int32
    return (x.detach().view(integers) & torch.iinfo(integers).max).amax().view(x.dtype).float()


@torch.library.custom_op("narrowgauge::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor,
    amax: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    dtype: torch.dtype,
    grain: list[int],
    grad: bool,
    saves: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., N] in `dtype`, and if `grad` what the backward pass needs: codes [K, M] of x and their scales in a row.

    Where the input itself is saved there are no codes, and instead of scales the amax [1] of x, if it makes the scale.
    """
    state: LayerState = layer_of(handle)
    recomputed = inside_backward()
    state.calls += 1
    if not recomputed:
        state.clock.catch_up()
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if grad:
        state.rows_seen = x_MK.shape[0]
        state.kept_weight.begin()
    call = Call.begin(state, dtype, "write" if grad and not recomputed else "read")
    with without_autocast(x.device.type):
        if grad and saves == INPUT_AND_AMAX:
            amax = state.backend.amax(x_MK, PerTensor())
        q_x, q_xT = quantize_operand(call, "input", x_MK, True, grad and saves == CODES, amax)
        q_w, _ = quantize_operand(call, "weight", weight, True, False)
        assert q_x is not None  # both plain copies are always asked for
        assert q_w is not None
        y_MN = gemms.fprop(call, q_x, q_w, bias, (x_MK, weight))
    codes, scale = x.new_empty(0), x.new_empty(0)
    if q_xT is not None:
        codes, scale = q_xT.codes.contiguous(), _flat(q_xT.scale)
    elif grad and saves == INPUT_AND_AMAX and amax is not None:
        scale = amax.reshape(1)
    if grad:
        state.clock.saw_data()
        if saves == CODES:
            _keep_samples(call, codes, gemms.keep_samples(call, x_MK, weight))
    return y_MN.reshape(*x.shape[:-1], weight.shape[0]), codes, scale


@linear_forward.register_fake
def _(
    x: Tensor,
    amax: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    dtype: torch.dtype,
    grain: list[int],
    grad: bool,
    saves: int,
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)
    if grad and saves == INPUT_AND_AMAX:
        return y, x.new_empty(0), x.new_empty(1, dtype=torch.float32)
    if saves != CODES or not grad:
        return y, x.new_empty(0), x.new_empty(0)
    M, K = math.prod(x.shape[:-1]), x.shape[-1]
    codes = x.new_empty((K, M), dtype=torch.float8_e5m2 if grain[0] else torch.float8_e4m3fn)
    scale = x.new_empty(math.prod(granularity_of(grain).scale_shape((K, M))), dtype=torch.float32)
    return y, codes, scale


@torch.library.custom_op("narrowgauge::linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor,
    amax: Tensor | None,
    x: Tensor | None,
    x_like: list[int],
    x_dtype: torch.dtype,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    codes_xT: Tensor,
    scale_xT: Tensor,
    handle: Tensor,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db, each empty if not among `needs`."""
    state: LayerState = layer_of(handle)
    call = Call.begin(state, dtype, "write")
    dy_MN = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
    if x is None:
        samples = state.samples.pop((call.turn, codes_xT.data_ptr()), None)
    else:
        x = x.reshape(dy_MN.shape[0], x.shape[-1])
        samples = gemms.keep_samples(call, x, weight)
    dx = dw = db = dy.new_empty(0)
    needs_dx, needs_dw, needs_db = needs
    again = Call(state, dtype, "again", False, call.turn, None)
    with without_autocast(dy.device.type):
        q_dy, q_dyT = quantize_operand(call, "grad_output", dy_MN, needs_dx, needs_dw, amax)
        if q_dy is not None:
            q_wT = quantize_operand(again, "weight", weight, False, True)[1]
            assert q_wT is not None
            dx = gemms.dgrad(call, q_dy, q_wT, x_dtype, dy_MN, samples).reshape(x_like)
        if q_dyT is not None:
            q_xT = _saved_codes(state, codes_xT, scale_xT) if x is None else _codes_again(again, x, scale_xT)
            dw = gemms.wgrad(call, q_dyT, q_xT, weight.dtype, dy_MN, samples)
        if needs_db and bias_dtype is not None:
            db = gemms.bias_gradient(dy_MN, bias_dtype)
    state.clock.saw_data()
    nothing = _nothing(dy, [0], x_dtype, weight, bias_dtype, [False] * 3)
    return dx if needs_dx else nothing[0], dw if needs_dw else nothing[1], db if needs_db else nothing[2]


@linear_backward.register_fake
def _(
    dy: Tensor,
    amax: Tensor | None,
    x: Tensor | None,
    x_like: list[int],
    x_dtype: torch.dtype,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    codes_xT: Tensor,
    scale_xT: Tensor,
    handle: Tensor,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _nothing(dy, x_like, x_dtype, weight, bias_dtype, needs)


def _nothing(
    dy: Tensor,
    x_like: list[int],
    x_dtype: torch.dtype,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx = dy.new_empty(x_like if needs[0] else 0, dtype=x_dtype)
    dw = dy.new_empty(tuple(weight.shape) if needs[1] else 0, dtype=weight.dtype)
    return dx, dw, dy.new_empty(dy.shape[-1] if needs[2] else 0, dtype=bias_dtype or dy.dtype)


def _saved_codes(state: LayerState, codes_xT: Tensor, scale_xT: Tensor) -> QTensor:
    rule = state.recipe.uses("input")[1]
    shape = rule.granularity.scale_shape((codes_xT.shape[0], codes_xT.shape[1]))
    return QTensor(codes_xT, _unflat(scale_xT, shape), rule.fmt, rule.granularity)


def _codes_again(again: Call, x_MK: Tensor, amax: Tensor) -> QTensor:
    known = amax.reshape(()) if amax.numel() else None
    q_xT = quantize_operand(again, "input", x_MK, False, True, known)[1]
    assert q_xT is not None
    return q_xT


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, amax, weight, bias, handle, dtype, _, _, saves = inputs
    _, codes_xT, scale_xT = output
    known = scale_xT if amax is None or saves == CODES else amax
    ctx.save_for_backward(weight, codes_xT, known, handle, *(() if saves == CODES else (x,)))
    ctx.amax_in_graph = amax is not None
    ctx.x_like, ctx.x_dtype, ctx.dtype = list(x.shape), x.dtype, dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(codes_xT, scale_xT)


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, codes_xT, scale_xT, handle, *x = ctx.saved_tensors
    needs = [bool(ctx.needs_input_grad[i]) for i in (0, 2, 3)]
    amax = _amax_in_graph(dy) if ctx.amax_in_graph else None
    like = (x[0] if x else None, ctx.x_like, ctx.x_dtype, weight, ctx.bias_dtype)
    found = linear_backward(dy, amax, *like, codes_xT, scale_xT, handle, ctx.dtype, needs)
    dx, dw, db = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return dx, None, dw, db, *5 * (None,)


linear_forward.register_autograd(_differentiate, setup_context=_save)


def _keep_samples(call: Call, codes: Tensor, samples: Samples) -> None:
    """Until its backward pass, which will be given the same codes. What no backward came for goes with its step."""
    kept = call.state.samples
    for turn, address in [key for key in kept if key[0] != call.turn]:
        del kept[turn, address]
    if samples is not None:
        kept[call.turn, codes.data_ptr()] = samples


def _flat(scale: Tensor) -> Tensor:
    """All scales in a row, in the order that block scales have in memory: no copy where a kernel of ours made them."""
    return (scale.t() if scale.dim() == 2 else scale).reshape(-1)


def _unflat(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    return flat.view(shape[::-1]).t() if len(shape) == 2 else flat.view(shape)
