"""A linear layer as three FP8 gemms in one autograd function.

    fprop   y_MN  = x_MK   · w_NK  + b_N       input x weight            in the autocast dtype, or x's
    dgrad   dx_MK = dy_MN  · wT_KN             grad_output x weight      in x's dtype
    wgrad   dw_NK = dyT_NM · xT_KM             grad_output x input       in the weight's dtype
            db_N  = sum_M dy_MN                                          never quantized

Every gemm contracts the last axis of both operands, because tensor cores want it so and because a scale can
only be factored out of a sum when it does not vary along it. Hence each tensor is needed twice, once along
each axis:

    one scale per tensor, or square blocks     one copy; its transpose is a view
    rows, 1x128, 1x32                          two copies, both made from high precision in the forward pass:
                                               wgrad never quantizes what was quantized already

For the backward pass we keep FP8 codes and scales, never x or w: 1 byte per element instead of 2 or 4. What
no gradient needs is not kept: a frozen weight saves no x, an input without grad saves no w.

**Who writes state.** A forward with grad writes amaxes and is observed. One without grad only reads. A
forward inside a backward pass is a recomputed one, and what it saw is only *noted* on its own graph node.
Under non-reentrant checkpointing that node never runs backward (the original does), and the note is dropped;
under reentrant checkpointing the first forward ran without grad and the recomputed node is the one that runs,
and then the note is delivered. So every forward that a backward consumes counts once, shared layers and
nested checkpoints included.

Legend: M = tokens (all leading dimensions), K = input features, N = output features; T = transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowgauge.compute.nn.clock import inside_backward
from narrowgauge.compute.nn.observer import GemmSample, ResultRole, picked, sample_rows
from narrowgauge.compute.nn.scale_table import amax_ratio
from narrowgauge.compute.quant import QTensor
from narrowgauge.compute.recipes import ROLES, Operand
from narrowgauge.errors import ShapeError

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState


_Samples = tuple[Tensor, Tensor, Tensor] | None


@dataclass
class _Call:
    """What one forward decided before autograd took over; lives on the graph node until its backward."""

    state: LayerState
    compute_dtype: torch.dtype
    mode: Literal["read", "write", "note"]
    watched: bool
    turn: int
    checked: ResultRole | None
    notes: list[Callable[[], object]] = field(default_factory=list)

    def tell(self, note: Callable[[], object]) -> None:
        """Run `note` now, or when the backward pass shows that this forward was not recomputed in vain."""
        if self.mode == "write":
            note()
        elif self.mode == "note":
            self.notes.append(note)

    def deliver(self) -> None:
        """Run the notes; whatever follows is written directly."""
        notes, self.notes, self.mode = self.notes, [], "write"
        for note in notes:
            note()


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState) -> Tensor:
    """Return x · wᵀ + b in FP8; x is [..., K], w [N, K], b [N], the result [..., N].

    Dtypes follow F.linear: the autocast dtype under autocast, else that of x. What F.linear would refuse, it
    refuses.
    """
    compute_dtype = _compute_dtype(x, weight, bias)
    if compute_dtype is None or x.shape[-1:] != weight.shape[1:]:
        F.linear(x, weight, bias)  # raises the error that the user knows
        raise ShapeError(f"x {list(x.shape)} {x.dtype} does not fit weight {list(weight.shape)} {weight.dtype}.")
    mode: Literal["read", "write", "note"] = "read"
    recomputed = inside_backward()
    if not recomputed:
        state.clock.catch_up()
    if torch.is_grad_enabled():
        mode = "note" if recomputed else "write"
        state.rows_seen = math.prod(x.shape[:-1])
    watched = mode != "read" and state.observer is not None and state.observer.wants(state.name)
    turn = state.clock.step
    call = _Call(state, compute_dtype, mode, watched, turn, state.result_to_check(turn) if watched else None)
    y: Tensor = _Fp8Linear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
    return y


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        state, recipe = call.state, call.state.recipe
        keep = call.mode != "read"
        needs_dx, needs_dw = (keep and needed for needed in ctx.needs_input_grad[:2])
        x_MK = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
        w_NK = weight.detach()
        with _without_autocast(x.device.type):
            q_x, q_xT = _quantize(call, "input", x_MK, True, needs_dw)
            q_w, q_wT = _quantize(call, "weight", w_NK, True, needs_dx)
            assert q_x is not None  # both plain copies are always asked for
            assert q_w is not None
            y_MN = state.backend.gemm(
                q_x, q_w, call.compute_dtype, bias=bias, fast_accum=recipe.fprop.fast_accum, fake=recipe.fake
            )
            if call.watched:
                call.tell(partial(_show_output, call, y_MN.detach(), x_MK, w_NK, bias))
        if keep:
            call.tell(state.clock.saw_data)
            ctx.call, ctx.x_shape, ctx.x_dtype, ctx.w_dtype = call, x.shape, x.dtype, weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
            ctx.save_for_backward(*_unpack(q_xT), *_unpack(q_wT))
            ctx.kept = (_rule(q_xT), _rule(q_wT))
            if call.watched:
                ctx.samples = _keep_samples(call, x_MK, w_NK)
        return y_MN.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        # With create_graph, dx depends on w and dw on x even where dy is a constant: differentiating them must fail.
        return _Fp8Linear._once(ctx, dy.detach().requires_grad_() if torch.is_grad_enabled() else dy)

    @staticmethod
    @once_differentiable
    def _once(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, state, recipe = ctx.call, ctx.call.state, ctx.call.state.recipe
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        codes_xT, scale_xT, codes_wT, scale_wT = ctx.saved_tensors
        q_xT, q_wT = _pack(codes_xT, scale_xT, ctx.kept[0]), _pack(codes_wT, scale_wT, ctx.kept[1])
        dy_MN = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
        dx = dw_NK = db_N = None
        with _without_autocast(dy.device.type):
            call.deliver()
            q_dy, q_dyT = _quantize(call, "grad_output", dy_MN, needs_dx, needs_dw)
            if q_dy is not None and q_wT is not None:
                dtype = call.compute_dtype if recipe.fake else ctx.x_dtype
                dx_MK = state.backend.gemm(q_dy, q_wT, dtype, fast_accum=recipe.dgrad.fast_accum, fake=recipe.fake)
                if call.watched:
                    _show_grad_input(call, dx_MK, dy_MN, ctx.samples)
                dx = dx_MK.to(ctx.x_dtype).reshape(ctx.x_shape)
            if q_dyT is not None and q_xT is not None:
                dtype = call.compute_dtype if recipe.fake else ctx.w_dtype
                dw_NK = state.backend.gemm(q_dyT, q_xT, dtype, fast_accum=recipe.wgrad.fast_accum, fake=recipe.fake)
                if call.watched:
                    _show_grad_weight(call, dw_NK, dy_MN, ctx.samples)
                dw_NK = dw_NK.to(ctx.w_dtype)
            if needs_db:
                db_N = dy_MN.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias_dtype)
        state.clock.saw_data()
        return dx, dw_NK, db_N, None


def _quantize(
    call: _Call, role: Literal["input", "weight", "grad_output"], x_MK: Tensor, plain: bool, transposed: bool
) -> tuple[QTensor | None, QTensor | None]:
    """Quantize x_MK for up to two gemms: plain [M, K] along K, transposed [K, M] along M; show it once."""
    state, recipe = call.state, call.state.recipe
    rule, rule_T = recipe.uses(role)
    given: dict[str, Tensor] = {}
    ratio = None
    if not (plain or transposed):
        return None, None
    if state.table is not None:
        given, ratio = _given_scale(call, role, x_MK, rule)
    q, q_T = state.backend.quantize_both(
        x_MK, rule if plain else None, rule_T if transposed else None, shared=recipe.shares(role), **given
    )
    if call.watched and state.observer is not None:
        shown = q if q is not None else q_T.T  # type: ignore[union-attr]
        call.tell(partial(state.observer.operand, state.name, role, x_MK, shown, amax_ratio=ratio))
    return q, q_T


def _given_scale(call: _Call, role: str, x_MK: Tensor, rule: Operand) -> tuple[dict[str, Tensor], Tensor]:
    """The table's scale, which knows nothing of this tensor yet, and amax now over what it assumes; tells the table."""
    state = call.state
    assert state.table is not None  # adopt made sure
    assert state.row is not None
    row = state.row + ROLES.index(role)
    if call.mode == "write" and x_MK.device != state.table.scale.device:
        state.table.to(x_MK.device)
    amax = state.backend.amax(x_MK, rule.granularity)
    scale, inv_scale = state.table.scale_of(row, rule, amax, write=call.mode == "write")
    if call.mode == "note":
        call.tell(partial(state.table.scale_of, row, rule, amax, write=True))
    if x_MK.numel():  # an expert without tokens has no data, and pushes nothing out of its history
        call.tell(partial(state.table.record, row, amax))
    return {"scale": scale, "inv_scale": inv_scale, "amax": amax}, amax_ratio(amax, scale, rule)


def _show_output(call: _Call, y_MN: Tensor, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None) -> None:
    state = call.state
    if state.observer is not None:
        check = None
        if call.checked == "output":
            check = sample_rows(y_MN, x_MK, w_NK, bias, state.sample_rows, call.turn)
        state.observer.result(state.name, "output", y_MN, check)


def _keep_samples(call: _Call, x_MK: Tensor, w_NK: Tensor) -> _Samples:
    """What the gradients' checks need of the high-precision operands: some columns of x, and w itself."""
    if call.checked == "output":
        return None
    columns = picked(x_MK.shape[1], call.state.sample_columns, call.turn, x_MK.device)
    return columns, x_MK[:, columns], w_NK


def _show_grad_input(call: _Call, dx_MK: Tensor, dy_MN: Tensor, samples: _Samples) -> None:
    state = call.state
    if state.observer is not None:
        check = None
        if call.checked == "grad_input" and samples is not None:
            check = sample_rows(dx_MK, dy_MN, samples[2].T, None, state.sample_rows, call.turn)
        state.observer.result(state.name, "grad_input", dx_MK, check)


def _show_grad_weight(call: _Call, dw_NK: Tensor, dy_MN: Tensor, samples: _Samples) -> None:
    state = call.state
    if state.observer is not None:
        check = None
        if call.checked == "grad_weight" and samples is not None:
            columns, x_MC, _ = samples
            # All rows of dw would read all of dy once more, in float32.
            rows = picked(dw_NK.shape[0], state.sample_outputs, call.turn, dw_NK.device)
            check = GemmSample(got=dw_NK[rows][:, columns].float(), want=dy_MN[:, rows].float().T @ x_MC.float())
        state.observer.result(state.name, "grad_weight", dw_NK, check)


def _compute_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype F.linear would compute in, None if it would refuse."""
    if not (x.is_floating_point() and weight.is_floating_point()):
        return None
    device_type = x.device.type
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if torch.is_autocast_enabled(device_type) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device_type)
    return x.dtype if len(dtypes) == 1 else None


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # What must be float32 in here is float32 on purpose.
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _unpack(q: QTensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if q is None else (q.codes, q.scale)


def _rule(q: QTensor | None) -> tuple[Any, Any] | None:
    return None if q is None else (q.fmt, q.granularity)


def _pack(codes: Tensor | None, scale: Tensor | None, rule: tuple[Any, Any] | None) -> QTensor | None:
    return None if codes is None or scale is None or rule is None else QTensor(codes, scale, *rule)
