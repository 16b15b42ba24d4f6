"""Quantizing an operand of a layer for up to two gemms: with its own scale, or with the model's table of scales.

    current, rows, blocks    the backend makes scales from x itself
    delayed, static          the table's scale, which knows nothing of this tensor yet; its amax goes to the table

A weight is the same in every microbatch of a step, so its codes may be kept between them (`kept_weights`).

Legend: M = rows, K = columns of the operand as it is; plain [M, K] is contracted over K, turned [K, M] over M.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.call import Call
from narrowgauge.compute.nn.kept_weight import Made
from narrowgauge.compute.nn.scaling.scale_table import amax_ratio
from narrowgauge.compute.nn.tracing.kept import kept_for_backward
from narrowgauge.compute.recipes import ROLES, Operand

OperandRole = Literal["input", "weight", "grad_output"]


def quantize_operand(
    call: Call, role: OperandRole, x_MK: Tensor, plain: bool, turned: bool, amax: Tensor | None = None
) -> Made:
    """Quantize x_MK for up to two gemms, and show it once to who watches.

    `amax` [] float32 is x's own, if somebody knows it already.
    """
    if not (plain or turned):
        return Made(None, None)
    if role == "weight" and call.mode != "read":
        made = _weight(call, x_MK, plain, turned, amax)
    else:
        made = _quantize(call, role, x_MK, plain, turned, amax)
    if call.watched and call.state.observer is not None and made.look is None:
        shown = made.plain if made.plain is not None else made.turned.T  # type: ignore[union-attr]
        call.tell(partial(call.state.observer.operand, call.state.name, role, x_MK, shown, amax_ratio=made.ratio))
    return made


def _weight(call: Call, w_NK: Tensor, plain: bool, turned: bool, amax: Tensor | None) -> Made:
    kept = call.state.kept_weight
    made = kept.find(w_NK)
    if made is None:
        both = kept.worth_keeping(w_NK)
        made = _quantize(call, "weight", w_NK, plain or both, turned or both, amax)
        if not both:
            return made
        kept.keep(w_NK, made._replace(look=None))
    # What is kept stays ours: an operator's output is its caller's to overwrite.
    return made if made.amax is None else made._replace(amax=made.amax.clone())


def _quantize(call: Call, role: OperandRole, x_MK: Tensor, plain: bool, turned: bool, amax: Tensor | None) -> Made:
    state, recipe = call.state, call.state.recipe
    rule, rule_T = recipe.uses(role)
    given = None
    if state.table is not None:
        given, amax = _given(call, role, x_MK, rule, amax)
    look = None
    # By two rules no kernel quantizes, and none counts; and what it counts are the plain codes.
    together = (plain or recipe.shares(role)) and (rule == rule_T or not turned)
    if together and call.watched and call.mode == "write" and state.backend.watches and state.observer is not None:
        look = state.observer.look(state.name, role, x_MK, rule, turned)
    try:
        q, q_T, amax = state.backend.quantize_both(
            x_MK,
            rule if plain else None,
            rule_T if turned else None,
            shared=recipe.shares(role),
            given=given,
            amax=amax,
            look=look,
        )
    except Exception:
        if look is not None:
            look.failed = True  # a program may go on after an error; the look holds another step's numbers
        raise
    ratio = None
    if given is not None and amax is not None:
        if given.slot is None and x_MK.numel():  # an expert without tokens has no data, and pushes none out
            call.tell(partial(state.table.record, _row(call, role), amax))  # type: ignore[union-attr]
        ratio = amax_ratio(amax, given.scale, rule) if call.watched and look is None else None
    return Made(q, q_T, amax, ratio, look, given)


def _given(
    call: Call, role: OperandRole, x_MK: Tensor, rule: Operand, amax: Tensor | None
) -> tuple[Given, Tensor | None]:
    """The table's scale, and x's amax where it had to be computed for it."""
    state, write = call.state, call.mode == "write"
    assert state.table is not None
    row = _row(call, role)
    if write and x_MK.device != state.table.scale.device:
        state.table.to(x_MK.device)
    if state.table.knows(row):
        return state.table.given(row, x_MK.device, write=write), amax
    if amax is None:
        amax = state.backend.amax(x_MK, rule.granularity)
    first = write or (call.mode == "read" and kept_for_backward())  # what is recomputed later will find it again
    scale, inv_scale = state.table.scale_of(row, rule, amax, write=first)
    if call.mode == "note":
        call.tell(partial(state.table.scale_of, row, rule, amax, write=True))
    return Given(scale, inv_scale, state.table.slot(row, x_MK.device) if write else None), amax


def _row(call: Call, role: OperandRole) -> int:
    assert call.state.row is not None  # adopt made sure
    return call.state.row + ROLES.index(role)
