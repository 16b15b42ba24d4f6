"""Convolutions as the matrix products that they are, in the layout that FP8 kernels run them in: channels last.

    y[p, n] = sum over taps t, channels c of  x[p + t, c] · w[n, t, c]          K = (t, c), channels innermost

A kernel gathers x[p + t, :] from the image, tap by tap, so an image is quantized once per pixel and not once per tap:
input is [B·H·W, C] and grad_output [B·H'·W', N], a row each pixel, and the weight is [N, taps·C]. Where a block of a
recipe divides C, these are the very codes of the unfolded matrix (im2col), whose rows only repeat pixels and pad with
zeros. In a convolution of G groups, C and N are those of one group, and a pixel is G rows.

A transposed convolution multiplies first and scatters after: input [B·H·W, C], contracted over C, weight [taps·N, C].
"""

from __future__ import annotations

from torch import Tensor


def pixels(x: Tensor, dims: int, groups: int) -> Tensor:
    """An image [B, C, ...] or [C, ...] of so many dimensions, as rows [pixels · groups, C / groups]."""
    last = x.movedim(-dims - 1, -1)
    return last.reshape(-1, x.shape[-dims - 1] // groups)


def taps(w: Tensor) -> Tensor:
    """A weight [N, C, ...] as [N, taps · C]."""
    return w.movedim(1, -1).reshape(w.shape[0], -1)


def transposed_taps(w: Tensor, groups: int) -> Tensor:
    """A transposed convolution's weight [C, N, ...] as [groups · N · taps, C / groups]."""
    C = w.shape[0] // groups
    return w.reshape(groups, C, -1).movedim(1, -1).reshape(-1, C)
