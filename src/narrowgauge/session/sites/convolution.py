"""Convolutions as the matrix products that they are, in the layout that FP8 kernels run them in: channels last.

    y[p, n] = sum over taps t, channels c of  x[p + t, c] · w[n, t, c]          K = (t, c), channels innermost

A kernel gathers x[p + t, :] from the image, tap by tap, so an image is quantized once per pixel and not once per tap:
input is [B·H·W, C] and grad_output [B·H'·W', N], a row each pixel, and the weight is [N, taps·C]. Where a block of a
recipe divides C, these are the very codes of the unfolded matrix (im2col), whose rows only repeat pixels and pad with
zeros. In a convolution of G groups, C and N are those of one group, and a pixel is G rows.

A transposed convolution multiplies first and scatters after: input [B·H·W, C], contracted over C, weight [taps·N, C].

A layer of torch's is known as such, and so tells of itself in a graph as well. Of any other the product inside of it
tells, in its name: one that pads in its own way, one that computes its weight (weight norm, weight standardization).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from narrowgauge.session.sites.part import Part, Turn, first_tensor, output_of, weight_of

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = {kind.forward: getattr(kind, "_conv_forward", None) for kind in _KINDS}


class Plain:
    """A convolution as torch made it, of zeros around the image."""

    whole = in_graph = True

    def knows(self, module: nn.Module) -> bool:
        """Whether it runs torch's forward on a weight that is a parameter."""
        kind = type(module)
        return (
            isinstance(module, _ConvNd)
            and kind.forward in _FORWARDS
            and getattr(kind, "_conv_forward", None) is _FORWARDS[kind.forward]
            and not {"forward", "_conv_forward"} & vars(module).keys()
            and module.padding_mode == "zeros"
            and module._parameters.get("weight") is not None
        )

    def parts(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """One product."""
        turns = image_turns(len(module.kernel_size), module.groups, module.transposed)
        return (Part(first_tensor(args, kwargs, "input"), weight_of(module), output_of(output), *turns),)


class Derived:
    """Any other: with a forward of its own, another padding, or a weight that is computed."""

    whole = in_graph = False

    def knows(self, module: nn.Module) -> bool:
        """Whether it is a convolution."""
        return isinstance(module, _ConvNd)

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """Nothing: what is multiplied inside has told, or it was none of torch's convolutions."""
        return ()


def image_turns(dims: int, groups: int, transposed: bool) -> tuple[Turn, Turn, Turn]:
    """How an image, the weight and the gradient of the result become rows."""
    image = partial(pixels, dims=dims, groups=groups)
    return image, partial(transposed_taps, groups=groups) if transposed else taps, image


def pixels(x: Tensor, dims: int, groups: int) -> Tensor:
    """An image [B, C, ...] or [C, ...] of so many dimensions, as rows [pixels · groups, C / groups]."""
    last = x.movedim(-dims - 1, -1)
    return last.reshape(-1, x.shape[-dims - 1] // groups)


def of_images(part: Part) -> bool:
    """Whether a product is a convolution's."""
    return getattr(part.x_rows, "func", None) is pixels


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
