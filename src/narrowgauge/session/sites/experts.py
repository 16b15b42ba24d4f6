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

from narrowgauge.compute.quant import Block, PerTensor, QTensor, quantize
from narrowgauge.compute.recipes import Operand


def quantize_experts(w_ENK: Tensor, rule: Operand) -> tuple[Tensor, QTensor]:
    """Return the stack [E·N, K] and what `rule` makes of it, expert by expert."""
    N, K = w_ENK.shape[1:]
    stack = w_ENK.reshape(-1, K)
    grain = rule.granularity
    if isinstance(grain, Block) and N % grain.rows:
        each = [quantize(w, rule.fmt, grain, scaling=rule.scaling, margin=rule.margin) for w in w_ENK]
        tall = torch.cat([q.scale.repeat_interleave(grain.rows, 0)[:N] for q in each])
        return stack, QTensor(torch.cat([q.codes for q in each]), tall, rule.fmt, Block(1, grain.cols))
    if isinstance(grain, PerTensor):
        grain = Block(N, K)
    return stack, quantize(stack, rule.fmt, grain, scaling=rule.scaling, margin=rule.margin)
