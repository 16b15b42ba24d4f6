"""What recipes without state, other than `current`, multiply a tensor by, from the formulas of their sources.

    rowwise      each row by itself                        448 / max(amax, 1e-12)
    blockwise    128 elements of a row; weights: 128x128   2^floor(log2(448 / amax))
    mxfp8        32 elements of a row                      1 / 2^ceil(log2(amax / 448))
    mxfp8-ocp    32 elements of a row                      1 / 2^(floor(log2 amax) - 8)

All cast to E4M3, gradients too; zeros are multiplied by 1 (blockwise) or 2^127 (mxfp8). What is left at an edge is a
granule as well. A rule gives two tensors, as large as x or with one number for each of its rows: the scale, by which
codes are multiplied to have x again, in float64; and its inverse, which x is multiplied by before, in float32.
"""

import torch
from torch.nn.functional import pad

ROLES = ("input", "weight", "grad_output")
EMAX = 8  # of 448 = 1.75 · 2^8
LEAST, MOST = -127, 126  # exponents of a scale in eight bits that have an inverse


def rows(x, largest):
    amax = x.abs().amax(1, keepdim=True).clamp(min=1e-12)
    return amax.double() / largest, torch.tensor(largest) / amax


def blocks(height, width, power):
    """Granules of so many rows and columns, whose scales are powers of two."""

    def rule(x, largest):
        m, k = x.shape
        whole = pad(x.abs().double(), (0, -k % width, 0, -m % height))
        amax = whole.view(len(whole) // height, height, -1, width).amax((1, 3))
        exponent = power(amax, largest).repeat_interleave(height, 0)[:m].repeat_interleave(width, 1)[:, :k]
        one = torch.ones_like(exponent, dtype=torch.float64)
        return torch.ldexp(one, exponent), torch.ldexp(one, -exponent).float()

    return rule


def floor_log2(x):
    """Exactly: x = mantissa · 2^exponent, and the mantissa is from 1/2 to below 1."""
    return torch.frexp(x).exponent - 1


def inverse_down(amax, largest):
    return torch.where(amax > 0, -floor_log2(largest / amax), 0).clamp(LEAST, MOST)


def scale_up(amax, largest):
    mantissa, exponent = torch.frexp(amax / largest)
    return torch.where(amax > 0, exponent - (mantissa == 0.5).int(), LEAST).clamp(LEAST, MOST)


def scale_down(amax, largest):
    return torch.where(amax > 0, floor_log2(amax) - EMAX, LEAST).clamp(LEAST, MOST)


RULES = {
    "rowwise": dict.fromkeys(ROLES, rows),
    "blockwise": {role: blocks(128 if role == "weight" else 1, 128, inverse_down) for role in ROLES},
    "mxfp8": dict.fromkeys(ROLES, blocks(1, 32, scale_up)),
    "mxfp8-ocp": dict.fromkeys(ROLES, blocks(1, 32, scale_down)),
}
KERNELS = {"rowwise", "blockwise"}  # by these, what a GPU is asked is counted by kernels
