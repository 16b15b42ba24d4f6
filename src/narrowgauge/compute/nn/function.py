"""A linear layer as three FP8 gemms in one autograd function: what runs where nothing is compiled.

    forward     input and weight quantized, fprop        backward    grad_output quantized, dgrad and wgrad

For the backward pass we keep FP8 codes and scales, never x or w: 1 byte per element instead of 2 or 4. What
no gradient needs is not kept: a frozen weight saves no x, an input without grad saves no w.

`gemms` has the three products, `operands` the quantizing, `call` who writes state; `compiled` is this function's twin
under torch.compile.

Legend: M = tokens (all leading dimensions), K = input features, N = output features; T = transposed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.compute.nn import gemms
from narrowgauge.compute.nn.call import Call, Mode, compute_dtype, without_autocast
from narrowgauge.compute.nn.once import no_forward_mode, once
from narrowgauge.compute.nn.operands import quantize_operand
from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.switched import Switched
from narrowgauge.compute.quant import QTensor
from narrowgauge.errors import ShapeError

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState) -> Tensor:
    """Return x · wᵀ + b in FP8; x is [..., K], w [N, K], b [N], the result [..., N].

    Dtypes follow F.linear: the autocast dtype under autocast, else that of x. What F.linear would refuse, it
    refuses.
    """
    dtype = expected_dtype(x, weight, bias)
    mode: Mode = "read"
    recomputed = inside_backward()
    if not recomputed:
        state.clock.catch_up()
    if torch.is_grad_enabled():
        mode = "note" if recomputed else "write"
        state.rows_seen = math.prod(x.shape[:-1])
        state.kept_weight.begin()
    call = Call.begin(state, dtype, mode)
    function = Switched if state.keeps_high else _Fp8Linear
    y: Tensor = function.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
    return y


def expected_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of the result; raises what F.linear would raise for tensors that do not fit."""
    dtype = compute_dtype(x, weight, bias)
    if dtype is None or x.shape[-1:] != weight.shape[1:]:
        F.linear(x, weight, bias)  # raises the error that the user knows
        raise ShapeError(f"x {list(x.shape)} {x.dtype} does not fit weight {list(weight.shape)} {weight.dtype}.")
    return dtype


class _Fp8Linear(torch.autograd.Function):
    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        keep = call.mode != "read"
        needs_dx, needs_dw = (keep and needed for needed in ctx.needs_input_grad[:2])
        x_MK = gemms.matrix(x.detach())
        w_NK = weight.detach()
        with without_autocast(x.device.type):
            q_x, q_xT, *_ = quantize_operand(call, "input", x_MK, True, needs_dw)
            q_w, q_wT, *_ = quantize_operand(call, "weight", w_NK, True, needs_dx)
            q_xT, q_wT = (q_xT if needs_dw else None), (q_wT if needs_dx else None)  # a kept weight has both
            assert q_x is not None  # both plain copies are always asked for
            assert q_w is not None
            y_MN = gemms.fprop(call, q_x, q_w, bias, (x_MK, w_NK))
        if keep:
            call.tell(call.state.clock.saw_data)
            ctx.call, ctx.x_shape, ctx.x_dtype, ctx.w_dtype = call, x.shape, x.dtype, weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
            ctx.save_for_backward(*_unpack(q_xT), *_unpack(q_wT))
            ctx.kept = (_rule(q_xT), _rule(q_wT))
            ctx.samples = gemms.keep_samples(call, x_MK, w_NK)
        return gemms.leading(y_MN, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return once(_Fp8Linear._gradients, ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        codes_xT, scale_xT, codes_wT, scale_wT = ctx.saved_tensors
        q_xT, q_wT = _pack(codes_xT, scale_xT, ctx.kept[0]), _pack(codes_wT, scale_wT, ctx.kept[1])
        dy_MN = gemms.matrix(dy)
        dx = dw_NK = db_N = None
        with without_autocast(dy.device.type):
            call.deliver()
            q_dy, q_dyT, *_ = quantize_operand(call, "grad_output", dy_MN, needs_dx, needs_dw)
            if q_dy is not None and q_wT is not None:
                dx = gemms.dgrad(call, q_dy, q_wT, ctx.x_dtype, dy_MN, ctx.samples).reshape(ctx.x_shape)
            del q_dy  # before dw takes room
            if q_dyT is not None and q_xT is not None:
                dw_NK = gemms.wgrad(call, q_dyT, q_xT, ctx.w_dtype, dy_MN, ctx.samples)
            if needs_db:
                db_N = gemms.bias_gradient(dy_MN, ctx.bias_dtype)
        call.state.clock.saw_data()
        return dx, dw_NK, db_N, None


def _unpack(q: QTensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if q is None else (q.codes, q.scale)


def _rule(q: QTensor | None) -> tuple[Any, Any] | None:
    return None if q is None else (q.fmt, q.granularity)


def _pack(codes: Tensor | None, scale: Tensor | None, rule: tuple[Any, Any] | None) -> QTensor | None:
    return None if codes is None or scale is None or rule is None else QTensor(codes, scale, *rule)
