"""Convolutions as the matrix products that they are, in the layout that FP8 kernels run them in: channels last.

    y[p, n] = sum over taps t, channels c of  x[p + t, c] · w[n, t, c]          K = (t, c), channels innermost

A kernel gathers x[p + t, :] from the image, tap by tap, so an image is quantized once per pixel and not once per tap:
input is [B·H·W, C] and grad_output [B·H'·W', N], a row each pixel, and the weight is [N, taps·C]. Where a block of a
recipe divides C, these are the very codes of the unfolded matrix (im2col), whose rows only repeat pixels and pad with
zeros. In a convolution of G groups, C and N are those of one group, and a pixel is G rows.

A transposed convolution multiplies first and scatters after: input [B·H·W, C], contracted over C, weight [taps·N, C].

A convolution whose weight is a parameter is told of by the product alone. One that computes it, by weight norm or
spectral norm, is known as a layer as well: the tensor that it multiplies would lead to no name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from narrowgauge.session.sites.part import Part


class Computing:
    """A convolution that computes its weight."""

    whole = in_graph = False

    def knows(self, module: nn.Module) -> bool:
        """Whether its weight is no parameter."""
        return isinstance(module, _ConvNd) and module._parameters.get("weight") is None

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """Nothing: what is multiplied inside has told, or it was none of torch's convolutions."""
        return ()


def pixels(x: Tensor, dims: int, groups: int) -> Tensor:
    """An image [B, C, ...] or [C, ...] of so many dimensions, as rows [pixels · groups, C / groups]."""
    last = x.movedim(-dims - 1, -1)
    return last.reshape(-1, x.shape[-dims - 1] // groups)


def taps(w: Tensor) -> Tensor:
    """A weight [N, C, ...] as [N, taps · C]."""
    return w.movedim(1, -1).reshape(w.shape[0], -1)


def weight_shape(module: _ConvNd) -> tuple[int, ...]:
    """What its weight's shape must be."""
    first, second = module.out_channels, module.in_channels
    if module.transposed:
        first, second = second, first
    return (first, second // module.groups, *module.kernel_size)


def transposed_taps(w: Tensor, groups: int) -> Tensor:
    """A transposed convolution's weight [C, N, ...] as [groups · N · taps, C / groups]."""
    C = w.shape[0] // groups
    return w.reshape(groups, C, -1).movedim(1, -1).reshape(-1, C)
