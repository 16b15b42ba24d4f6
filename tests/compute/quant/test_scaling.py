from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.compute.quant import (
    CURRENT,
    CURRENT_POW2,
    E8M0_OCP,
    E8M0_UP,
    ROWWISE,
    ROWWISE_POW2,
    e8m0_bytes,
    inv_scale_from_amax,
)
from narrowgauge.errors import FormatError
from narrowgauge.formats import E4M3FN, E4M3FNUZ, E5M2, E8M0, Format, codec

FLOAT32_MAX = float(np.finfo(np.float32).max)
ALL = [CURRENT, CURRENT_POW2, ROWWISE, ROWWISE_POW2, E8M0_UP, E8M0_OCP]
positive = st.floats(min_value=2.0**-149, max_value=FLOAT32_MAX, width=32)


def inv_scale(amax: float, fmt: Format, scaling, margin: int = 0) -> float:
    return inv_scale_from_amax(torch.tensor(amax, dtype=torch.float32), fmt, scaling, margin).item()


def byte(amax: float, scaling=E8M0_UP, margin: int = 0, fmt: Format = E4M3FN) -> int:
    return int(e8m0_bytes(torch.tensor(amax, dtype=torch.float32), fmt, scaling, margin))


def up(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def down(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


@pytest.mark.parametrize(("amax", "wanted"), [(3.0, 128.0), (448.0, 1.0), (0.0, 1.0)])
def test_known_answer_4_current_power_of_two(amax, wanted):
    assert inv_scale(amax, E4M3FN, CURRENT_POW2) == wanted


@pytest.mark.parametrize(("amax", "wanted"), [(448.0, 127), (449.0, 128), (1.0, 119), (0.0, 0)])
def test_known_answer_5_mxfp8_bytes(amax, wanted):
    assert byte(amax) == wanted


@pytest.mark.parametrize(
    ("amax", "wanted"),
    [
        (up(448.0), 128),
        (down(448.0), 127),
        (224.0, 126),
        (up(224.0), 127),
        (math.inf, 0xFE),
        (math.nan, 0xFF),
        (1e-40, 0),
        (FLOAT32_MAX, 127 + 120),
        (448 * 2.0**-127, 0),
        (up(448 * 2.0**-127), 1),
        (448 * 2.0**-126, 1),
    ],
)
def test_bytes_at_powers_of_two_and_at_the_ends(amax, wanted):
    assert byte(amax) == wanted


@pytest.mark.parametrize(
    ("amax", "wanted"), [(448.0, 127), (256.0, 127), (down(256.0), 126), (511.0, 127), (512.0, 128), (0.0, 0)]
)
def test_the_ocp_floor_looks_at_the_binade_alone(amax, wanted):
    assert byte(amax, E8M0_OCP) == wanted


@given(amax=positive, fmt=st.sampled_from([E4M3FN, E5M2, E4M3FNUZ]), margin=st.integers(0, 4))
def test_bytes_against_exact_arithmetic(amax: float, fmt: Format, margin: int):
    # Integer powers of two, tried one by one: no logarithm to be wrong.
    ratio = Fraction(amax) / Fraction(fmt.max)
    wanted = next(e for e in range(-170, 130) if Fraction(2) ** e >= ratio) + margin
    assert byte(amax, E8M0_UP, margin, fmt) == min(max(127 + wanted, 0), 253)
    floor = math.frexp(amax)[1] - 1 - fmt.emax + margin
    assert byte(amax, E8M0_OCP, margin, fmt) == min(max(127 + floor, 0), 253)


@given(amax=positive, fmt=st.sampled_from([E4M3FN, E5M2, E4M3FNUZ]), margin=st.integers(0, 4))
def test_inv_scale_against_exact_arithmetic(amax: float, fmt: Format, margin: int):
    exact = Fraction(fmt.max) / Fraction(amax) / 2**margin
    current = inv_scale(amax, fmt, CURRENT, margin)
    with np.errstate(over="ignore"):
        wanted = float(np.float32(fmt.max * 2.0**-margin) / np.float32(amax))
    assert current == min(wanted, FLOAT32_MAX)
    power = inv_scale(amax, fmt, CURRENT_POW2, margin)
    assert math.frexp(power)[0] == 0.5
    assert power <= exact
    assert 2 * Fraction(power) > exact or power == 2.0**127


@given(amax=positive)
def test_mxfp8_scale_is_what_its_byte_decodes_to(amax: float):
    for scaling in (E8M0_UP, E8M0_OCP):
        decoded = codec.decode(byte(amax, scaling), E8M0)
        assert 1 / inv_scale(amax, E4M3FN, scaling) == decoded
        if scaling is E8M0_UP:
            assert amax <= decoded * 448


@pytest.mark.parametrize("scaling", ALL, ids=lambda s: s.name)
def test_a_nonfinite_amax_gives_1_and_every_other_something_finite_and_positive(scaling):
    assert inv_scale(math.inf, E4M3FN, scaling) == 1
    assert inv_scale(math.nan, E4M3FN, scaling) == 1
    for amax in (0.0, -0.0, 2.0**-149, 1e-40, 1.0, FLOAT32_MAX):
        for margin in (0, 8):
            for fmt in (E4M3FN, E5M2):
                assert 2.0**-126 <= inv_scale(amax, fmt, scaling, margin) <= FLOAT32_MAX


@pytest.mark.parametrize(
    ("scaling", "zero", "tiny"),
    [
        (CURRENT, 1.0, FLOAT32_MAX),
        (CURRENT_POW2, 1.0, 2.0**127),
        (ROWWISE, float(np.float32(448) / np.float32(1e-12)), float(np.float32(448) / np.float32(1e-12))),
        (ROWWISE_POW2, 2.0**48, 2.0**48),
        (E8M0_UP, 2.0**127, 2.0**127),
        (E8M0_OCP, 2.0**127, 2.0**127),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_zero_and_a_subnormal_amax(scaling, zero, tiny):
    assert inv_scale(0.0, E4M3FN, scaling) == zero
    assert inv_scale(1e-40, E4M3FN, scaling) == tiny


@pytest.mark.parametrize("scaling", ALL, ids=lambda s: s.name)
def test_a_margin_divides_by_its_power_of_two(scaling):
    assert inv_scale(5.0, E4M3FN, scaling, margin=3) == inv_scale(5.0, E4M3FN, scaling) / 8


def test_shapes_and_dtypes_pass_through():
    amax = torch.rand(3, 2, dtype=torch.bfloat16)
    for scaling in ALL:
        found = inv_scale_from_amax(amax, E4M3FN, scaling)
        assert (found.shape, found.dtype) == ((3, 2), torch.float32)
    assert e8m0_bytes(amax.t(), E4M3FN).shape == (2, 3)
    assert e8m0_bytes(amax, E4M3FN).dtype == torch.uint8


def test_a_scaling_without_bytes_says_so():
    with pytest.raises(FormatError, match=r"'current' has no E8M0 bytes; expected E8M0_UP or E8M0_OCP\."):
        e8m0_bytes(torch.ones(()), E4M3FN, CURRENT)
