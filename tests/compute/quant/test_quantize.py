from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from narrowgauge.compute.quant import (
    CURRENT,
    CURRENT_POW2,
    E8M0_OCP,
    E8M0_UP,
    ROWWISE,
    ROWWISE_POW2,
    Block,
    BLOCK_1x32,
    BLOCK_1x128,
    BLOCK_128x128,
    PerColumn,
    PerRow,
    PerTensor,
    QTensor,
    inv_scale_from_amax,
    quantize,
)
from narrowgauge.compute.quant.quantize import scales_for
from narrowgauge.errors import FormatError, ShapeError, UsageError
from narrowgauge.formats import E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, codec_array

FORMATS = [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ]
GRANULARITIES = [PerTensor(), PerRow(), PerColumn(), BLOCK_1x128, BLOCK_128x128, BLOCK_1x32, Block(5, 7)]
SCALINGS = [CURRENT, CURRENT_POW2, ROWWISE, ROWWISE_POW2, E8M0_UP, E8M0_OCP]
vectors = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)


def bytes_of(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8).numpy()


def assert_same(found: QTensor, wanted: QTensor) -> None:
    assert torch.equal(found.scale, wanted.scale)
    assert np.array_equal(bytes_of(found.codes), bytes_of(wanted.codes))


def by_the_oracle(x: torch.Tensor, inv_scale: torch.Tensor, fmt) -> np.ndarray:
    """The definition, in numpy: one float32 product, clamped, encoded by the formats' own codec."""
    product = x.float().numpy() * inv_scale.numpy()
    return codec_array.encode(product, fmt, "saturate")


def difficult(fmt) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    values = torch.from_numpy(codec_array.decode(np.arange(fmt.max_code + 1), fmt)).float()
    ties = (values[1:] + values[:-1]) / 2
    binades = torch.exp2(torch.randint(-30, 30, (40, 300), generator=gen))
    specials = torch.randn(6, 200, generator=gen)
    specials[0, 3], specials[2, 150], specials[4, 199] = torch.inf, torch.nan, -torch.inf
    return {
        "random": torch.randn(130, 260, generator=gen),
        "spread": torch.randn(40, 300, generator=gen) * binades,
        "tied": torch.stack([ties, -ties, ties.nextafter(ties * 0), ties.nextafter(ties * 2)]),
        "subnormal": torch.randn(7, 140, generator=gen) * 1e-41,
        "tiny": torch.randn(7, 140, generator=gen) * 1e-36,
        "huge": torch.randn(7, 140, generator=gen).clamp(-3, 3) * 1e38,
        "zeros": torch.tensor([[0.0, -0.0, 1.0], [0.0, 0.0, -0.0]]),
        "nonfinite": specials,
        "empty": torch.empty(0, 5),
    }


def test_known_answer_1_what_flushes():
    x = torch.tensor([0.0, -0.0, 2.0**-10, 1.01 * 2.0**-10, 1.0])
    q = quantize(x, E4M3FN, scale=1.0)
    assert bytes_of(q.codes).tolist() == [[0x00, 0x80, 0x00, 0x01, 0x38]]
    zero_code = q.codes.float() == 0
    assert ((x != 0) & zero_code).sum().item() / x.numel() == 0.20


def test_known_answer_2_what_saturates():
    x = torch.tensor([448.0, 449.0, -500.0, 1.0])
    q = quantize(x, E4M3FN, scale=1.0)
    assert bytes_of(q.codes).tolist() == [[0x7E, 0x7E, 0xFE, 0x38]]
    beyond = x.abs() * q.inv_scale > E4M3FN.max * (1 + 2**-20)
    assert beyond.sum().item() / x.numel() == 0.50


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_are_the_oracles_whatever_enters(fmt):
    for name, x in difficult(fmt).items():
        for granularity in GRANULARITIES:
            for scaling in SCALINGS:
                q = quantize(x, fmt, granularity, scaling=scaling)
                inv_scale = inv_scale_from_amax(granularity.amax(x), fmt, scaling)
                inv_scale = granularity.expand(inv_scale, q.shape)
                wanted = by_the_oracle(x, inv_scale, fmt)
                wrong = np.argwhere(bytes_of(q.codes) != wanted)
                assert wrong.size == 0, (name, granularity, scaling, wrong[:3])
        q = quantize(x, fmt, scale=1.0)
        assert np.array_equal(bytes_of(q.codes), by_the_oracle(x, torch.ones(()), fmt)), name


@pytest.mark.parametrize(
    ("fmt", "granularity", "scaling", "wanted_db"),
    [
        (E4M3FN, PerTensor(), CURRENT, 31.5),
        (E5M2, PerTensor(), CURRENT, 25.6),
        (E4M3FN, PerRow(), ROWWISE, 31.5),
        (E4M3FN, PerRow(), ROWWISE_POW2, 31.5),
        (E4M3FN, BLOCK_1x128, CURRENT_POW2, 31.5),
        (E4M3FN, BLOCK_128x128, CURRENT_POW2, 31.5),
        (E4M3FN, BLOCK_1x32, E8M0_UP, 31.5),
        (E4M3FN, BLOCK_1x32, E8M0_OCP, 30.6),
    ],
    ids=lambda v: getattr(v, "name", None) or str(v),
)
def test_a_healthy_cast_has_this_signal_to_noise_ratio(fmt, granularity, scaling, wanted_db):
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    error = x - quantize(x, fmt, granularity, scaling=scaling).dequantize()
    found_db = 10 * math.log10(x.double().square().sum() / error.double().square().sum())
    assert abs(found_db - wanted_db) < 0.25


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_element_poisons_its_granule_and_no_other(granularity, bad):
    x = torch.randn(9, 260)
    x[4, 200] = bad
    clean = x.clone()
    clean[4, 200] = 0
    q = quantize(x, E4M3FN, granularity)
    poisoned = ~granularity.amax(x).isfinite()
    assert torch.equal(q.scale.isnan(), poisoned)
    assert poisoned.sum() == 1
    assert torch.equal(q.inv_scale.isnan(), torch.zeros_like(poisoned))
    dead = granularity.expand(poisoned, q.shape)
    assert torch.equal(q.dequantize().isnan(), dead)
    unharmed = quantize(clean, E4M3FN, granularity)
    assert torch.equal(q.dequantize()[~dead], unharmed.dequantize()[~dead])
    # inv_scale is 1 there, and the clamp leaves no Inf among the codes.
    codes, beside = q.codes.float(), dead & x.isfinite()
    assert torch.equal(codes[beside], x[beside].to(torch.float8_e4m3fn).float())
    assert codes[4, 200].isnan() if math.isnan(bad) else codes[4, 200] == math.copysign(448, bad)


@pytest.mark.parametrize("given", [2.0, torch.tensor(2.0)], ids=["float", "tensor"])
def test_a_given_scale_is_used_as_it_is_and_does_not_hide_what_is_not_finite(given):
    x = torch.tensor([[1.0, 1000.0]])
    q = quantize(x, E4M3FN, scale=given, margin=3)
    assert q.scale == 2.0
    assert q.dequantize().tolist() == [[1.0, 896.0]]
    x[0, 0] = torch.inf
    assert quantize(x, E4M3FN, scale=given).dequantize().isnan().all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_under_a_given_scale_codes_do_not_depend_on_the_amax_and_the_scale_does(bad):
    x = torch.tensor([[1.0, 3.0, -1000.0]])
    want = quantize(x, E4M3FN, scale=2.0).codes.float()
    x[0, 0] = bad
    q = quantize(x, E4M3FN, scale=2.0)
    assert q.scale.isnan()
    assert torch.equal(q.codes.float()[0, 1:], want[0, 1:])
    found = scales_for(torch.tensor([1.0, bad, 1.0, bad]), E4M3FN, scale=torch.tensor([2.0, 2.0, -1.0, 0.0]))
    assert found[0].nan_to_num(-1).tolist() == [2, -1, -1, -1]
    assert found[1].tolist() == [0.5, 0.5, 1, 1]


@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_a_given_tensor_with_an_impossible_scale_poisons_that_granule(value):
    q = quantize(torch.ones(2, 2), E4M3FN, PerRow(), scale=torch.tensor([[1.0], [value]]))
    assert q.scale.isnan().flatten().tolist() == [False, True]
    assert q.codes.float().tolist() == [[1, 1], [1, 1]]


def test_a_given_amax_saves_the_pass_and_changes_nothing():
    x = torch.randn(8, 200)
    for granularity in GRANULARITIES:
        assert_same(quantize(x, E5M2, granularity, amax=granularity.amax(x)), quantize(x, E5M2, granularity))
    assert quantize(x, E4M3FN, amax=torch.tensor(torch.inf)).scale.isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_are_converted_first(dtype):
    x = torch.randn(4, 96).to(dtype)
    before = x.clone()
    for granularity in GRANULARITIES:
        assert_same(quantize(x, E4M3FN, granularity), quantize(x.float(), E4M3FN, granularity))
    assert torch.equal(x, before)


def test_the_input_is_not_touched_and_not_part_of_the_graph():
    x = torch.randn(4, 96, requires_grad=True)
    before = x.detach().clone()
    for granularity in GRANULARITIES:
        q = quantize(x, E4M3FN, granularity)
        assert not q.codes.requires_grad
        assert not q.scale.requires_grad
    assert torch.equal(x, before)


def test_a_float64_beyond_float32_is_not_hidden():
    assert quantize(torch.tensor([1e300, 1.0], dtype=torch.float64), E4M3FN).scale.isnan()


def test_leading_dimensions_are_flattened_and_empty_tensors_work():
    x = torch.randn(2, 3, 5, 32)
    assert quantize(x, E4M3FN).shape == (30, 32)
    assert quantize(x[0, 0, 0], E4M3FN).shape == (1, 32)
    assert_same(quantize(x, E4M3FN, BLOCK_1x32), quantize(x.reshape(30, 32), E4M3FN, BLOCK_1x32))
    for shape in [(0, 32), (4, 0, 32), (3, 0), (2, 3, 0)]:
        for granularity in GRANULARITIES:
            q = quantize(torch.empty(shape), E5M2, granularity)
            assert q.shape == (math.prod(shape[:-1]), shape[-1])
            assert q.dequantize().shape == q.T.dequantize().t().shape


def test_a_transposed_view_quantizes_as_its_copy_does():
    x = torch.randn(70, 40)
    for granularity in GRANULARITIES:
        assert_same(quantize(x.t(), E4M3FN, granularity), quantize(x.t().contiguous(), E4M3FN, granularity))


def test_margin_leaves_headroom():
    x = torch.tensor([[7.0, 1.0]])
    assert quantize(x, E4M3FN, margin=2).codes.float().abs().max() == 112


@given(vectors, st.sampled_from(FORMATS), st.sampled_from(SCALINGS))
def test_quantizing_what_was_dequantized_with_the_same_scale_changes_nothing(values, fmt, scaling):
    x = torch.tensor([values])
    first = quantize(x, fmt, scaling=scaling)
    # codes · scale may overflow, or round so coarsely among float32's subnormals that codes move.
    assume(2.0**-100 < first.scale < 2.0**100)
    second = quantize(first.dequantize(), fmt, scale=first.scale)
    assert_same(second, first)


@given(vectors, st.sampled_from(FORMATS), st.sampled_from(SCALINGS))
def test_larger_in_is_never_smaller_out(values, fmt, scaling):
    x = torch.tensor([sorted(values)])
    codes = quantize(x, fmt, scaling=scaling).codes.float()
    assert (codes.diff() >= 0).all()


@given(vectors, st.sampled_from(FORMATS), st.sampled_from([CURRENT, ROWWISE, CURRENT_POW2, E8M0_UP]))
def test_the_error_is_at_most_half_a_unit_in_the_last_place(values, fmt, scaling):
    x = torch.tensor([values], dtype=torch.float32)
    q = quantize(x, fmt, scaling=scaling)
    exact, scale = x.double(), q.scale.double()
    binade = torch.frexp(exact.abs() / scale).exponent - 1
    half_ulp = torch.exp2(binade.clamp(min=fmt.emin).double() - fmt.mantissa_bits - 1)
    # x · inv_scale and 1 / inv_scale are float32: two roundings, and near max a binade's edge may be crossed.
    slack = 1 + 2.0**-20
    assert ((exact - q.codes.double() * scale).abs() <= half_ulp * scale * slack + exact.abs() * 2.0**-22).all()


def test_what_does_not_fit_is_said():
    x = torch.ones(2, 64)
    with pytest.raises(FormatError, match=r"tensors cannot be quantized to E2M1; expected one of E4M3FN"):
        quantize(x, E2M1)
    for dtype in ("e4m3", torch.float8_e4m3fn):
        with pytest.raises(FormatError, match=r"e4m3(fn)?'? is no format; expected one of narrowgauge\.formats: "):
            quantize(x, dtype)
    for granularity in (PerRow, "row"):
        with pytest.raises(UsageError, match=r"is no granularity; expected PerTensor\(\), PerRow\(\),"):
            quantize(x, E4M3FN, granularity)
    with pytest.raises(UsageError, match=r"'e8m0_up' is no scaling; expected CURRENT, ROWWISE or another of "):
        quantize(x, E4M3FN, scaling="e8m0_up")
    with pytest.raises(FormatError, match=r"takes a dense tensor, found torch\.sparse_coo; x\.to_dense\(\) is one\."):
        quantize(x.to_sparse(), E4M3FN)
    for other in (x.numpy(), [1.0, 2.0]):
        with pytest.raises(UsageError, match=r"quantize takes a torch tensor, found a (ndarray|list); "):
            quantize(other, E4M3FN)
    with pytest.raises(FormatError, match=r"takes float16, bfloat16, float32 or float64, found torch\.int64\."):
        quantize(torch.ones(2, 2, dtype=torch.int64), E4M3FN)
    with pytest.raises(FormatError, match=r"found torch\.float8_e5m2\."):
        quantize(torch.ones(2, 2).to(torch.float8_e5m2), E4M3FN)
    with pytest.raises(ShapeError, match=r"at least one dimension \[\.\.\., K\], found a scalar; reshape it\."):
        quantize(torch.ones(()), E4M3FN)
    with pytest.raises(ShapeError, match=r"the given scale has shape \[1\], expected \[2, 1\]\."):
        quantize(x, E4M3FN, PerRow(), scale=torch.ones(1))
    with pytest.raises(ShapeError, match=r"cols=32\) of \[2, 64\] needs amax of \[2, 2\], found \[\]\."):
        quantize(x, E4M3FN, BLOCK_1x32, amax=torch.ones(()))
    for scale in (0.0, -1.0, math.inf, math.nan, 1e-50):
        with pytest.raises(UsageError, match=r"a scale lies between 2\.94e-39 and 3\.4e\+38, found "):
            quantize(x, E4M3FN, scale=scale)
