"""The compiled walk is a twin of the quantizer: what it says of codes that nobody made is said of those codes."""

import itertools
import re
import zlib
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from tests.observe.stats.test_oracle import FORMATS, GRANULARITIES, HARD, assert_agrees, hard

from narrowgauge.compute.quant import (
    CURRENT,
    CURRENT_POW2,
    E8M0_OCP,
    E8M0_UP,
    ROWWISE,
    ROWWISE_POW2,
    PerRow,
    PerTensor,
    inv_scale_from_amax,
    quantize,
)
from narrowgauge.compute.quant.dtypes import torch_dtype
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.metrics import MOMENTS, finalize
from narrowgauge.observe.stats import (
    host,
    host_bits,
    host_kernel,
    host_moved,
    host_part,
    host_rounding,
    host_sample,
    host_scales,
    measure,
    team,
)
from narrowgauge.observe.stats.packing import Packer

SCALINGS = [CURRENT, CURRENT_POW2, ROWWISE, ROWWISE_POW2, E8M0_UP, E8M0_OCP]
ALL = (0, 1), (0, 1)
FLUSHED_XX = MOMENTS.offsets["flushed_xx"]


def assert_judged_as_quantized(x, rule, *shares):
    shares = shares or ALL
    x_MK = x.reshape(-1, x.shape[-1])
    q = quantize(x_MK, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin)
    found, want = host.judge(x_MK, rule, *shares), host.count(x_MK, q, *shares)
    assert found.vector[FLUSHED_XX] == pytest.approx(want.vector[FLUSHED_XX], rel=1e-12)  # added in another order
    np.testing.assert_array_equal(np.delete(found.vector, FLUSHED_XX), np.delete(want.vector, FLUSHED_XX))
    np.testing.assert_array_equal(found.columns, want.columns)
    return found, q


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_rule_bit_by_bit(fmt, granularity):
    x = torch.randn(150, 133, generator=torch.Generator().manual_seed(0))
    for scaling, margin in itertools.product(SCALINGS, (0, 3, -2)):
        assert_judged_as_quantized(x, Operand(fmt, granularity, scaling, margin))


@pytest.mark.parametrize("loud", [1e9, 1e20, 1e30])
def test_the_cosine_of_what_saturates_by_many_binades(loud):
    """Under a scale that knows nothing of it; the squares of x and of d have no digit in common."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * loud
    q = quantize(x, E4M3FN, scale=1.0)
    assert finalize(host.count(x, q, *ALL).vector[None])["cosine"][0] == pytest.approx(
        measure(x, q)["cosine"], rel=1e-9
    )


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=str)
@pytest.mark.parametrize("name", HARD)
def test_hard_numbers_bit_by_bit(name, granularity):
    for scaling in SCALINGS:
        assert_judged_as_quantized(hard(name), Operand(E4M3FN, granularity, scaling))


def test_what_is_judged_agrees_with_the_oracle():
    found, q = assert_judged_as_quantized(hard("sparse bfloat16"), Operand(E4M3FN, PerTensor(), CURRENT))
    packer = Packer()
    packer.add("", [found])
    assert_agrees(finalize(packer.pack()[1].numpy()), hard("sparse bfloat16"), q, rel=1e-9)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=str)
def test_the_largest_number_that_is_flushed_alone_among_louder_ones(granularity):
    x = torch.full((150, 64), 448.0)
    x[70, 9] = 2.0**-10  # a tie, which goes to zero
    found, _ = assert_judged_as_quantized(x, Operand(E4M3FN, granularity, CURRENT))
    assert found.vector[FLUSHED_XX] == 2.0**-20
    x[70, 9] = torch.nextafter(x[70, 9], torch.tensor(1.0))
    assert assert_judged_as_quantized(x, Operand(E4M3FN, granularity, CURRENT))[0].vector[FLUSHED_XX] == 0.0


def test_rows_that_do_not_lie_next_to_each_other():
    wide = torch.randn(40, 300)
    assert_judged_as_quantized(wide[:, 7:200], Operand(E5M2, PerTensor(), CURRENT), (1, 4), (0, 2))
    assert_judged_as_quantized(torch.randn(5).expand(9, 5), Operand(E4M3FN, PerTensor(), CURRENT))
    assert_judged_as_quantized(torch.randn(30, 20).T, Operand(E4M3FN, PerRow(), ROWWISE))


def every_bfloat16():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    return x[x.isfinite()]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_numbers_round_as_they_are_cast(fmt):
    halfway = torch.arange(256, dtype=torch.uint8).view(torch_dtype(fmt)).float()
    halfway = halfway[halfway.isfinite()].sort().values
    ties = (halfway[1:] + halfway[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    x = torch.cat((every_bfloat16(), ties, *near))
    d, one = np.empty(len(x), np.float32), np.ones(len(x), np.float32)
    facts, limits = host._numbers(fmt)
    most, least, up = host_rounding.steps_of(facts, limits)
    steps = np.float32(most), np.int32(least), np.int32(up)
    host_rounding.round_row(x.numpy(), one, one, steps, d)
    want = x.clamp(-fmt.max, fmt.max).to(torch_dtype(fmt)).float().numpy()
    np.testing.assert_array_equal(d, want)
    largest = np.abs(x.numpy()[want == 0]).max()
    assert host_rounding.flushed_up_to(np.float32(1), steps) == largest.view(np.int32)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_code_is_read_as_torch_reads_it(fmt):
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(torch_dtype(fmt)).float().numpy()
    d, one = np.empty(1, np.float32), np.ones(1, np.float32)
    facts = host._numbers(fmt)[0]
    for code in range(256):
        here, sure = codes[code : code + 1], np.isfinite(want[code])
        assert host_rounding.zero_codes(one.view(np.int32), here, facts) == ((want[code] == 0) if sure else -1)
        if sure:
            host_rounding.decode_row(here, facts, one, d)
            assert d[0] == want[code]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.name)
def test_scales_are_the_quantizers(scaling):
    amax = every_bfloat16().abs().unique()
    amax = torch.cat((amax, torch.nextafter(amax, torch.tensor(torch.inf)), torch.tensor([448.0, 1e-12])))
    amax = amax[amax.isfinite()]
    for fmt, margin in itertools.product((E4M3FN, E5M2), (0, 4, -3)):
        facts, limits = host._numbers(fmt, scaling, margin)
        found = [host_rounding.inv_scale_of(value, facts, limits) for value in amax.numpy()]
        np.testing.assert_array_equal(found, inv_scale_from_amax(amax, fmt, scaling, margin).numpy())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_what_is_not_all_finite_is_given_back(granularity, value):
    for at in ((0, 0), (39, 49)):
        x = torch.randn(40, 50)
        x[at] = value
        assert host.judge(x, Operand(E4M3FN, granularity, CURRENT), *ALL) is None
        assert host.count(x, quantize(x, E4M3FN, granularity), *ALL) is None
        assert host.count_result(x) is None


def test_what_is_no_plain_memory_is_given_back():
    class Strange(torch.Tensor):
        pass

    x = torch.randn(4, 8)
    rule = Operand(E4M3FN, PerTensor(), CURRENT)
    freed, flat = torch.randn(4, 8), torch.randn(1 << 22)
    part = flat[-1024:].view(4, 256)  # which keeps an address, though not of anything
    for owner in (freed, flat):
        owner.untyped_storage().resize_(0)
    turned = torch._neg_view(x)
    for odd in (x.as_subclass(Strange), freed, part, turned):
        assert host.judge(odd, rule, *ALL) is None
        assert host.count_result(odd) is None
    assert host.judge(torch.nn.Parameter(x), rule, *ALL) is not None


MADE_OF = {
    host_kernel: ("bits", "compare", "part", "rounding", "sample", "scales", "team"),
    host_moved: ("bits", "team"),
}


WIDE = {
    host_bits: ("bits_of", "extremes", "mean_of", "scan"),
    host_part: ("_count_lost", "_compare", "add_columns"),
    host_rounding: ("spread", "round_row", "decode_row", "zero_codes"),
    host_sample: ("sample", "_place_ranges"),
    host_scales: ("_runs", "make_scales"),
}


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in WIDE.items() for name in names])
def test_what_loops_over_numbers_does_so_in_the_widest_registers(of, name):
    function = getattr(of, name)
    assert "widely" in function.py_func.__code__.co_names


def test_a_function_that_says_so_is_compiled_for_them():
    def summed(x):
        host_bits.widely()
        return x.sum()

    compiled = numba.njit(summed)
    compiled(np.ones(3))
    (code,) = compiled.inspect_llvm().values()
    assert '"prefer-vector-width"="512"' in code


@pytest.mark.parametrize("walk", MADE_OF, ids=lambda walk: walk.__name__)
def test_the_cache_sees_that_a_part_has_changed(walk):
    # numba asks the file of the function alone whether what it compiled is still true.
    folder = Path(walk.__file__).parent
    names = MADE_OF[walk]
    mentioned = set(
        re.findall(r"stats\.host_(\w+) import", "".join((folder / f"host_{n}.py").read_text() for n in names))
    )
    assert mentioned <= {*names}
    parts = b"".join((folder / f"host_{name}.py").read_bytes() for name in names)
    assert zlib.crc32(parts) == walk.PARTS, f"write PARTS = {zlib.crc32(parts)}"


def test_what_is_asked_of_the_walk_has_room():
    told = host._by_rule(Operand(E4M3FN, PerTensor(), CURRENT), 4, 6)
    asked = host._asked(told, 4, 6, 16, 8, (1, 2), (3, 13), (5, 7))
    assert dict(zip(host_kernel.ASKED, asked.tolist(), strict=False)) == {
        **{"shift": 16, "stride": 8, "codes_at": 1, "scale_at": 2, "first": 3, "every": 13},
        **{"first_compared": 5, "every_compared": 7, "M": 4, "K": 6, "tall": 4, "wide": 6, "team_at": team.address()},
    }
    assert asked[len(host_kernel.ASKED) :].tolist() == told[0][len(host_kernel.ASKED) :].tolist()
    assert not told[0][: len(host_kernel.ASKED)].any()  # what is told of a rule serves other matrices as well


@pytest.mark.parametrize("sizes", [(5, 9), (1, 40), (7, 0), (3, 3)])
def test_central_moments_merge_as_those_of_all(sizes):
    rng = np.random.default_rng(0)
    sets = [rng.standard_normal(size) ** 3 + 5 * i for i, size in enumerate(sizes)]

    def central(x):
        mean = x.mean() if x.size else 0.0
        return np.array([x.size, mean, *(((x - mean) ** p).sum() for p in (2, 3, 4))], dtype=np.float64)

    merged, other = map(central, sets)
    host_sample.merge_central(merged, other)
    np.testing.assert_allclose(merged, central(np.concatenate(sets)), rtol=1e-12)
