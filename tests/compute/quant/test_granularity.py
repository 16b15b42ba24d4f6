from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.compute.quant import (
    Block,
    BLOCK_1x32,
    BLOCK_1x128,
    BLOCK_128x128,
    PerColumn,
    PerRow,
    PerTensor,
)
from narrowgauge.errors import ShapeError

ALL = [PerTensor(), PerRow(), PerColumn(), BLOCK_1x128, BLOCK_128x128, BLOCK_1x32, Block(4, 3), Block(3, 1)]
SHAPES = [(8, 256), (256, 128), (5, 200), (131, 7), (1, 1), (130, 129)]


def slow_granule(granularity, i: int, j: int) -> tuple[int, ...]:
    match granularity:
        case PerTensor():
            return ()
        case PerRow():
            return (i, 0)
        case PerColumn():
            return (0, j)
        case Block(rows, cols):
            return (i // rows, j // cols)


@pytest.mark.parametrize("granularity", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_amax_is_the_largest_magnitude_of_each_granule(granularity, dtype):
    for shape in [*SHAPES, (7, 33)]:
        x = torch.randn(shape).to(dtype)
        wanted = np.zeros(granularity.scale_shape(shape), np.float32)
        for (i, j), value in np.ndenumerate(x.float().numpy()):
            g = slow_granule(granularity, i, j)
            wanted[g] = max(wanted[g], abs(value))
        for layout in (x, x.t().contiguous().t()):
            found = granularity.amax(layout)
            assert found.dtype == torch.float32
            np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_expand_and_multiply_give_every_element_the_scale_of_its_granule(granularity):
    for shape in SHAPES:
        scale = torch.rand(granularity.scale_shape(shape))
        full = granularity.expand(scale, shape)
        assert full.shape == shape
        wanted = torch.tensor(
            [[scale[slow_granule(granularity, i, j)] for j in range(shape[1])] for i in range(shape[0])]
        )
        assert torch.equal(full, wanted)
        x = torch.randn(shape)
        assert torch.equal(granularity.multiply(x, scale, out=torch.empty_like(x)), x * wanted)
        turned = x.t().clone(memory_format=torch.contiguous_format).t()
        assert torch.equal(granularity.multiply(turned, scale, out=turned), x * wanted)


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_a_nonfinite_element_shows_in_its_granule_and_in_no_other(granularity):
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(9, 150)
        x[7, 140] = bad
        amax = granularity.amax(x)
        hit = torch.zeros_like(amax, dtype=torch.bool)
        hit[slow_granule(granularity, 7, 140)] = True
        assert torch.equal(~amax.isfinite(), hit)
        assert bool(amax[hit].isnan().all()) == (bad != bad)


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_empty_matrices_have_the_amax_of_nothing(granularity):
    for shape in [(0, 64), (64, 0), (0, 0)]:
        amax = granularity.amax(torch.empty(shape))
        assert tuple(amax.shape) == granularity.scale_shape(shape)
        assert not amax.any()


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_zeros_have_amax_plus_zero(granularity):
    for zero in (0.0, -0.0):
        assert not granularity.amax(torch.full((3, 150), zero)).signbit().any()


@given(rows=st.integers(1, 9), cols=st.integers(1, 9), height=st.integers(1, 20), width=st.integers(1, 20))
def test_ragged_blocks_are_padded_blocks_cut_off(rows, cols, height, width):
    block = Block(rows, cols)
    x = torch.randn(height, width)
    padded = torch.zeros(-(-height // rows) * rows, -(-width // cols) * cols)
    padded[:height, :width] = x
    assert torch.equal(block.amax(x), block.amax(padded))


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_transposed_twice_is_itself_and_fits_the_transpose(granularity):
    assert granularity.transposed().transposed() == granularity
    x = torch.randn(40, 150)
    amax, turned = granularity.amax(x), granularity.transposed().amax(x.t())
    assert torch.equal(amax.t() if amax.dim() == 2 else amax, turned)


def test_what_does_not_fit_is_said():
    with pytest.raises(ShapeError, match=r"a matrix \[M, K\], found shape \[2, 3, 4\]; flatten it\."):
        PerRow().amax(torch.ones(2, 3, 4))
    with pytest.raises(ShapeError, match=r"a block needs whole sides of at least 1, found cols=0\."):
        Block(1, 0)
    with pytest.raises(ShapeError, match=r"found rows=1\.5\."):
        Block(1.5, 1)
