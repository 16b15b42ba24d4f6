"""The weights of many experts in one parameter: one matrix [E·N, K], each expert scaled for itself.

    recipe's granularity   of the stack                      one scale per
    PerTensor              Block(N, K)                       expert
    PerRow, Block(1, c)    as it is: rows are experts' own   row; tile
    Block(r, c)            as it is if r divides N           square within an expert
                           else Block(1, c)                  the same squares, each scale written once per row

So one site tells of all experts, and a layer of a hundred of them costs what a dense one of its size costs.

Legend: E = experts, N = output features, K = input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.quant import Block, Granularity, PerTensor, QTensor, quantize
from narrowgauge.compute.recipes import Operand


def of_stack(grain: Granularity, w_ENK: Tensor) -> Granularity:
    """The granularity of the stack by which every expert has what `grain` would give it alone.

    Not of squares that do not divide N: those are no granularity of the stack.
    """
    N, K = w_ENK.shape[1:]
    return Block(N, K) if isinstance(grain, PerTensor) else grain


def quantize_experts(w_ENK: Tensor, rule: Operand) -> QTensor:
    """Return what `rule` makes of the stack [E·N, K], expert by expert."""
    N, K = w_ENK.shape[1:]
    grain = rule.granularity
    if isinstance(grain, Block) and N % grain.rows:
        each = [quantize(w, rule.fmt, grain, scaling=rule.scaling, margin=rule.margin) for w in w_ENK]
        tall = torch.cat([q.scale.repeat_interleave(grain.rows, 0)[:N] for q in each])
        return QTensor(torch.cat([q.codes for q in each]), tall, rule.fmt, Block(1, grain.cols))
    stack = w_ENK.reshape(-1, K)
    return quantize(stack, rule.fmt, of_stack(grain, w_ENK), scaling=rule.scaling, margin=rule.margin)
