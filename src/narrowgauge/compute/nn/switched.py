"""The linear layer of which some products or operands stay high: the twin of `function` and `compiled` in one.

    forward    x and w quantized if any of their products is in FP8      saved: x and w themselves
    backward   grad_output quantized; x and w once more, for what their products still need

What stays high is computed as the unconverted layer computes it, bit by bit. Saving x and w takes what the unconverted
layer takes; codes of them would be made for some products and not for others.

One operator each way, eager and compiled alike: a compiler sees them and does not look into them.

Legend: M = tokens (all leading dimensions), K = input features, N = output features; T = transposed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.compute.nn import gemms
from narrowgauge.compute.nn.call import Call, Mode, without_autocast
from narrowgauge.compute.nn.once import no_forward_mode, once
from narrowgauge.compute.nn.operands import OperandRole, quantize_operand
from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.capture import capturing
from narrowgauge.compute.nn.tracing.handle import layer_of
from narrowgauge.compute.nn.tracing.operator import derivative_of, operator, shapes_of
from narrowgauge.compute.quant import QTensor
from narrowgauge.compute.recipes.switched import quantizes

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState


class Switched(torch.autograd.Function):
    """The layer where nothing is compiled."""

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """y [..., N]."""
        if call.mode != "read":
            call.tell(call.state.clock.saw_data)
            ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
            ctx.save_for_backward(x, weight)
        return _forward(call, x.detach(), weight.detach(), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """dx, dw and db, not to be differentiated."""
        return once(Switched._gradients, ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        x, weight = ctx.saved_tensors
        call.deliver()
        found = _backward(call, dy, x, weight, ctx.bias_dtype, ctx.needs_input_grad[:3])
        call.state.clock.saw_data()
        return *found, None


@operator
def switched_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, dtype: torch.dtype, grad: bool, revision: int
) -> Tensor:
    """y [..., N] in `dtype`, in a compiled graph; `revision` is this code's."""
    state: LayerState = layer_of(handle)
    recomputed, captured = inside_backward(), capturing(x)
    state.calls += 1
    if not recomputed:
        state.clock.catch_up()
    mode: Mode = "read"
    if grad:
        mode = "note" if recomputed and state.waits else "write"  # as in `compiled`
        state.rows_seen = math.prod(x.shape[:-1])
        state.kept_weight.begin()
    y = _forward(Call.begin(state, dtype, mode, captured), x, weight, bias)
    if grad:
        if mode == "write":
            state.wait(1)
        state.clock.saw_data()
        if captured:
            state.clock.captured()
    return y


@shapes_of(switched_forward)
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, dtype: torch.dtype, grad: bool, revision: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@operator
def switched_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    handle: Tensor,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db, each empty if not among `needs`."""
    state: LayerState = layer_of(handle)
    state.wait(-1)
    found = _backward(Call.begin(state, dtype, "write", capturing(dy)), dy, x, weight, bias_dtype, needs)
    state.clock.saw_data()
    dx, dw, db = (grad if grad is not None else dy.new_empty(0) for grad in found)
    return dx, dw, db


@shapes_of(switched_backward)
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    handle: Tensor,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(tuple(x.shape)) if needs[0] else dy.new_empty(0)
    dw = weight.new_empty(tuple(weight.shape)) if needs[1] else dy.new_empty(0)
    db = dy.new_empty(dy.shape[-1], dtype=bias_dtype) if needs[2] and bias_dtype is not None else dy.new_empty(0)
    return dx, dw, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, handle, ctx.dtype, *_ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, handle)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, handle = ctx.saved_tensors
    needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    found = switched_backward(dy, x, weight, ctx.bias_dtype, handle, ctx.dtype, needs)
    return *(grad if need else None for grad, need in zip(found, needs, strict=True)), *4 * (None,)


derivative_of(switched_forward, _differentiate, _save)


def _forward(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    recipe = call.state.recipe
    x_MK = gemms.matrix(x)
    with without_autocast(x.device.type):
        q_x = _quantized(call, "input", x_MK, "wgrad")
        q_w = _quantized(call, "weight", weight, "dgrad")
        a = q_x if q_x is not None and quantizes(recipe, "fprop", "input") else x_MK
        b = q_w if q_w is not None and quantizes(recipe, "fprop", "weight") else weight
        y_MN = gemms.fprop(call, a, b, bias, (x_MK, weight))
    return gemms.leading(y_MN, x)


def _quantized(call: Call, role: OperandRole, x: Tensor, later: str) -> QTensor | None:
    """Codes for fprop; or, if only a `later` product reads some, for the state and for whoever watches."""
    recipe, heard = call.state.recipe, call.mode != "read" and (call.watched or call.state.table is not None)
    if not quantizes(recipe, "fprop", role) and not (heard and quantizes(recipe, later, role)):
        return None
    return quantize_operand(call, role, x, True, False).plain


def _backward(
    call: Call, dy: Tensor, x: Tensor, weight: Tensor, bias_dtype: torch.dtype | None, needs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    recipe = call.state.recipe
    again = Call(call.state, call.compute_dtype, "again", False, call.turn, None)
    needs_dx, needs_dw, needs_db = needs
    x, weight = x.detach(), weight.detach()
    x_MK = gemms.matrix(x)
    dy_MN = gemms.matrix(dy)
    dx = dw_NK = db_N = None
    with without_autocast(dy.device.type):
        samples = gemms.keep_samples(call, x_MK, weight)
        in_dgrad, in_wgrad = (quantizes(recipe, gemm, "grad_output") for gemm in ("dgrad", "wgrad"))
        q_dy, q_dyT, *_ = quantize_operand(call, "grad_output", dy_MN, needs_dx and in_dgrad, needs_dw and in_wgrad)
        if needs_dx:
            w_T: gemms.Factor | None = weight.t()
            if quantizes(recipe, "dgrad", "weight"):
                w_T = quantize_operand(again, "weight", weight, False, True).turned
            assert w_T is not None  # it was asked for
            a = q_dy if q_dy is not None else dy_MN
            dx = gemms.dgrad(call, a, w_T, x.dtype, dy_MN, samples).reshape(x.shape)
        if needs_dw:
            x_T: gemms.Factor | None = x_MK.t()
            if quantizes(recipe, "wgrad", "input"):
                x_T = quantize_operand(again, "input", x_MK, False, True).turned
            assert x_T is not None  # it was asked for
            a = q_dyT if q_dyT is not None else dy_MN.t()
            dw_NK = gemms.wgrad(call, a, x_T, weight.dtype, dy_MN, samples)
        if needs_db and bias_dtype is not None:
            db_N = gemms.bias_gradient(dy_MN, bias_dtype)
    return dx, dw_NK, db_N
