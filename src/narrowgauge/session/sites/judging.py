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
from narrowgauge.compute.nn.operands import OperandRole, quantize_operand
from narrowgauge.compute.nn.scaling.scale_table import amax_ratio
from narrowgauge.compute.quant import PerTensor
from narrowgauge.session.sites.experts import quantize_experts
from narrowgauge.session.sites.part import Own, Rule


def judge(state: LayerState, role: OperandRole, x: Tensor, own: Own | None) -> str:
    """Have it counted; a note for the run where the layer's own rule says that it can't be, else ""."""
    rule: Rule | str = Rule(state.recipe.uses(role)[0]) if own is None else own(role, x)
    if isinstance(rule, str):
        return rule
    product = getattr(state.observer, "product", None) if own is None and x.is_cpu and x.dim() == 2 else None
    if product is not None and product(state.name, role, x, rule.operand):
        return ""
    counts = getattr(state.observer, "judge", None) if product is None and x.dim() == 2 else None
    if counts is not None and counts(state.name, role, x, rule.operand, rule.given):
        pass  # it was counted, and nothing had to be quantized for it
    elif x.numel():
        with torch.no_grad(), torch.cuda.device_of(x), _plain_math(x.device.type):
            if own is not None:
                _look_by(state, role, x, rule)
            elif x.dim() == 2:
                quantize_operand(Call.begin(state, x.dtype, "write"), role, x, True, False)
            elif state.observer is not None:
                state.observer.operand(state.name, role, x, quantize_experts(x, rule.operand))
    ask = getattr(state.observer, "unconverted", None) if own is None else None
    if ask is not None:
        ask(state.name, role, x)
    return ""


@contextmanager
def _plain_math(device_type: str) -> Iterator[None]:
    """Without autocast; `torch.autocast` would cost as much as counting a small tensor does."""
    was = torch.is_autocast_enabled(device_type)
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
