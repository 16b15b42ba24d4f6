"""One tensor of a product, [M, K] or that of experts: quantized as a rule says, counted, and thrown away.

rule    the layer's own, with its scale, or else what the recipe says of the operand
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from narrowgauge.compute.nn.call import Call
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.observer import selects
from narrowgauge.compute.nn.operands import OperandRole, quantize_operand
from narrowgauge.compute.nn.scaling.scale_table import amax_ratio
from narrowgauge.compute.quant import PerTensor
from narrowgauge.session.sites.experts import quantize_experts
from narrowgauge.session.sites.part import Rule


def judge(state: LayerState, role: OperandRole, x: Tensor, rule: Rule, own: bool) -> None:
    """Have it counted where the observer knows no shorter way. `own`: the rule is the layer's own."""
    observer, matrix = state.observer, x.dim() == 2
    if observer is None or not selects(observer, state.name, role):
        return
    counts = getattr(observer, "judge", None) if matrix else None
    if counts is not None and counts(state.name, role, x, rule.operand, rule.given):
        return  # and nothing had to be quantized for it
    if x.numel():
        x = x.detach()
        with torch.no_grad(), torch.cuda.device_of(x), plain_math(x.device.type):
            if own:
                _look_by(state, role, x, rule)
            elif matrix:
                quantize_operand(Call.begin(state, x.dtype, "write"), role, x, True, False)
            else:
                observer.operand(state.name, role, x, quantize_experts(x, rule.operand))
    ask = None if own else getattr(observer, "unconverted", None)
    if ask is not None:
        ask(state.name, role, x)


@contextmanager
def plain_math(device_type: str) -> Iterator[None]:
    """Without autocast; `torch.autocast` would cost as much as counting a small tensor does."""
    was = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    if was:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        if was:
            torch.set_autocast_enabled(device_type, True)


def _look_by(state: LayerState, role: OperandRole, x_MK: Tensor, rule: Rule) -> None:
    """Quantize as the layer does, and have it counted."""
    observer, (operand, given) = state.observer, rule
    if observer is None:
        return
    look = observer.look(state.name, role, x_MK, operand, turned=False) if state.backend.watches else None
    whole = operand.granularity == PerTensor()
    try:
        q, _, amax = state.backend.quantize_both(x_MK, operand, None, shared=whole, given=given, look=look)
    except Exception:
        if look is not None:
            look.failed = True  # it holds another step's numbers
        raise
    if look is None and q is not None:
        ratio = None if given is None or amax is None else amax_ratio(amax, given.scale, operand)
        observer.operand(state.name, role, x_MK, q, amax_ratio=ratio)
