"""The three products of a linear layer, between quantized operands; who watches sees every tensor once.

    fprop   y_MN  = x_MK   · w_NK  + b_N       input x weight            in the autocast dtype, or x's
    dgrad   dx_MK = dy_MN  · wT_KN             grad_output x weight      in x's dtype
    wgrad   dw_NK = dyT_NM · xT_KM             grad_output x input       in the weight's dtype
            db_N  = sum_M dy_MN                                          never quantized

Every gemm contracts the last axis of both operands, because tensor cores want it so and because a scale can
only be factored out of a sum when it does not vary along it. Hence each tensor is needed twice, once along
each axis:

    one scale per tensor, or square blocks     one copy; its transpose is a view, or made in the same read
    rows, 1x128, 1x32                          two copies, both made from high precision: wgrad never quantizes
                                               what was quantized already

Legend: M = tokens (all leading dimensions), K = input features, N = output features; T = transposed.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, mm

from narrowgauge.compute.nn.call import Call
from narrowgauge.compute.nn.observer import GemmSample, Samples, picked, sample_rows
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.quant import QTensor
from narrowgauge.compute.recipes.recipe import Gemm

Factor = QTensor | Tensor  # a tensor where the recipe keeps it high
_AS = torch.ops.aten._unsafe_view.default


def matrix(x: Tensor) -> Tensor:
    """x [..., C] as [M, C]."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def leading(y_MN: Tensor, x: Tensor) -> Tensor:
    """y [M, N] as [..., N], of x [..., K]; no view, which autograd lets nobody change in place."""
    if x.dim() == 2 and not y_MN._is_view():
        return y_MN
    y: Tensor = _AS(y_MN.contiguous(), (*x.shape[:-1], y_MN.shape[-1]))  # as F.linear does
    return y


def product(call: Call, gemm: Gemm, a: Factor, b: Factor, out: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [P, C] times b [Q, C] transposed, plus bias [Q]: in FP8, or as an unconverted layer would if `gemm` says so."""
    state = call.state
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        fake = state.recipe.fake or bool(gemm.high)
        return state.backend.gemm(a, b, out, bias=bias, fast_accum=gemm.fast_accum, fake=fake)
    high = [factor.dequantize(out) if isinstance(factor, QTensor) else factor.to(out) for factor in (a, b)]
    return F.linear(high[0], high[1], None if bias is None else bias.to(out))


def _dtype_of(call: Call, gemm: Gemm, dtype: torch.dtype) -> torch.dtype:
    """A gradient's: where nothing is multiplied in FP8, what the unconverted layer would compute in."""
    return call.compute_dtype if call.state.recipe.fake or gemm.high else dtype


def fprop(call: Call, x: Factor, w: Factor, bias: Tensor | None, high: tuple[Tensor, Tensor]) -> Tensor:
    """y [M, N]; `high` are x_MK and w_NK before quantization, for the gemm check."""
    y_MN = product(call, call.state.recipe.fprop, x, w, call.compute_dtype, bias)
    if call.shows("output"):
        call.tell(partial(_show_output, call, y_MN.detach(), *high, bias))
    return y_MN


def dgrad(call: Call, dy: Factor, w_T: Factor, dtype: torch.dtype, dy_MN: Tensor, samples: Samples) -> Tensor:
    """dx [M, K] in `dtype`."""
    state, gemm = call.state, call.state.recipe.dgrad
    dx_MK = product(call, gemm, dy, w_T, _dtype_of(call, gemm, dtype))
    if call.shows("grad_input") and state.observer is not None:
        check = None
        if call.checked == "grad_input" and samples is not None:
            check = sample_rows(dx_MK, dy_MN, samples[0].T, None, state.sample_rows, call.turn)
        state.observer.result(state.name, "grad_input", dx_MK, check)
    return dx_MK.to(dtype)


def wgrad(call: Call, dy_T: Factor, x_T: Factor, dtype: torch.dtype, dy_MN: Tensor, samples: Samples) -> Tensor:
    """dw [N, K] in `dtype`."""
    state, gemm = call.state, call.state.recipe.wgrad
    dw_NK = product(call, gemm, dy_T, x_T, _dtype_of(call, gemm, dtype))
    if call.shows("grad_weight") and state.observer is not None:
        check = None
        if call.checked == "grad_weight" and samples is not None:
            columns, x_MC = samples
            # All rows of dw would read all of dy once more, in float32.
            rows = picked(dw_NK.shape[0], state.sample_outputs, call.turn, dw_NK.device)
            got = dw_NK.index_select(0, rows).index_select(1, columns).float()
            check = GemmSample(got, want=mm(dy_MN.index_select(1, rows).float().T, x_MC.float()))
        state.observer.result(state.name, "grad_weight", dw_NK, check)
    return dw_NK.to(dtype)


def bias_gradient(dy_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """db [N]: summed in float32 or wider, rounded once."""
    return dy_MN.sum(0, dtype=torch.promote_types(dy_MN.dtype, torch.float32)).to(dtype)


def keep_samples(call: Call, x_MK: Tensor, w_NK: Tensor) -> Samples:
    """What the check of a gradient needs of the high-precision operands: w itself, or some columns of x."""
    if not call.watched or call.checked in (None, "output"):
        return None
    return unseen_by_modes(_samples, call, x_MK, w_NK)


def _samples(call: Call, x_MK: Tensor, w_NK: Tensor) -> Samples:
    if call.checked == "grad_input":
        return (w_NK,)
    columns = picked(x_MK.shape[1], call.state.sample_columns, call.turn, x_MK.device)
    return columns, x_MK.index_select(1, columns)


def _show_output(call: Call, y_MN: Tensor, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None) -> None:
    state = call.state
    if state.observer is not None:
        check = None
        if call.checked == "output":
            check = sample_rows(y_MN, x_MK, w_NK, bias, state.sample_rows, call.turn)
        state.observer.result(state.name, "output", y_MN, check)
