"""How a parameter lies as the tensor that was made of it, where a convolution or an equation multiplies that.

w.unsqueeze(-1), w.view(heads, k, d)    the same numbers in other axes
w.transpose(0, 1)                       a decoder tied to its encoder
w[:4], w[:, :4]                         a piece: the whole parameter is shown, as in `F.linear`
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from narrowgauge.session.sites.part import Turn


def laid_as(p: Tensor, w: Tensor, turned: bool) -> Turn | None:
    """What lays parameter `p` as `w` lies, which is made of it; None if that is not known."""
    if p.dim() != w.dim():
        # Without the first size: a rank may hold a part of the parameter alone, cut along its rows.
        return partial(_in_other_axes, axes=w.shape[1:]) if p.numel() == w.numel() and not turned else None
    if p.numel() == w.numel() and (turned or p.shape != w.shape):
        swaps = [swap for swap in ((0, 1), (-1, -2)) if p.transpose(*swap).shape == w.shape]
        return partial(_swapped, swap=swaps[0]) if swaps else None
    return None if turned else _as_it_is


def _as_it_is(p: Tensor) -> Tensor:
    return p


def _in_other_axes(p: Tensor, axes: tuple[int, ...]) -> Tensor:
    return p.reshape(-1, *axes)


def _swapped(p: Tensor, swap: tuple[int, int]) -> Tensor:
    return p.transpose(*swap)
