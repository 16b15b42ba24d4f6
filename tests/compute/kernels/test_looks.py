"""What watched kernels gather while they quantize is what the slow oracle counts; codes are the plain kernels'."""

import math
import warnings
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from tests.compute.kernels.hard import DTYPES
from tests.compute.kernels.hard import NAMES as HARD
from tests.compute.kernels.hard import hard as hardest
from tests.waiting import no_waiting

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.scaling.scale_table import amax_ratio
from narrowgauge.compute.quant import (
    CURRENT,
    CURRENT_POW2,
    ROWWISE,
    BLOCK_1x32,
    BLOCK_1x128,
    BLOCK_128x128,
    PerRow,
    PerTensor,
    QTensor,
)
from narrowgauge.compute.recipes import BLOCKWISE, DELAYED, ROLES, Operand
from narrowgauge.compute.recipes import CURRENT as CURRENT_RECIPE
from narrowgauge.compute.recipes import ROWWISE as ROWWISE_RECIPE
from narrowgauge.errors import UsageError
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.moments import moments

pytest.importorskip("triton")

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused import amax, blocks, quantize, rows, tensorwise
from narrowgauge.compute.kernels.fused.watched import blocks as watched_blocks
from narrowgauge.compute.kernels.fused.watched import grains, looks, plan
from narrowgauge.compute.kernels.fused.watched import moments as own
from narrowgauge.compute.kernels.fused.watched import rows as watched_rows
from narrowgauge.compute.kernels.fused.watched import tensorwise as watched_tensorwise
from narrowgauge.compute.kernels.fused.watched.tensor_cores import EACH

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
RULES = [Operand(E4M3FN, PerTensor(), CURRENT), Operand(E5M2, PerTensor(), CURRENT_POW2, margin=2)]
SHAPES = [(150, 134), (1, 300), (129, 1), (700, 260)] if GPU else [(35, 131)]
EXACT = {
    "numel",
    "nan_count",
    "inf_count",
    "amax",
    "amin",
    "n",
    "scaled",
    "flushed",
    "saturated",
    "compared",
    "sample_n",
}
# Sums of errors have no digits where nothing was lost: theirs are measured against the sum of squares.
ERRORS = {"dd", "ee", "xd", "flushed_xx"}


@pytest.fixture(autouse=True)
def every_row(monkeypatch):
    """All of a tensor is sampled, and small ones are walked over as large ones are."""
    monkeypatch.setattr(plan, "SAMPLE", 1 << 30)
    monkeypatch.setattr(looks, "WALKS", {key: replace(walk, enough=0) for key, walk in looks.WALKS.items()})
    plain = {key: replace(walk, enough=0) for key, walk in looks.PLAIN_WALKS.items() if walk != plan.LINES}
    monkeypatch.setattr(looks, "PLAIN_WALKS", looks.PLAIN_WALKS | plain)
    plan.Plan.of.cache_clear()
    yield
    plan.Plan.of.cache_clear()


hard = partial(hardest, binades=40)  # whose squares are float32 too
NAMES = [*HARD, "far from zero"]


def assert_packed(found, want, share=1.0, skip=(), edges=0.02):
    """Counts equal, sums to 1e-5, histograms but for lines on the edge of two bins: two and a share of all."""
    found, want = found.cpu(), want.cpu()
    energy = float(want[MOMENTS["xx"]]) * share
    for slot in MOMENTS.slots:
        if slot.name in skip:
            continue
        a, b = found[MOMENTS[slot.name]], want[MOMENTS[slot.name]]
        if slot.width > 1:
            moved = (a - b).cumsum(0).abs().sum()  # lines, each to the next bin
            assert float(moved) <= (edges * float(b.sum()) + 2 if "sqnr" in slot.name else 0), slot.name
            assert float(a.sum()) == float(b.sum()), slot.name
        elif slot.name in EXACT:
            assert torch.equal(a, b), (slot.name, a, b)
        else:
            slack = 1e-6 * float(want[MOMENTS["scale_mean"]]) ** 2 if slot.name == "scale_m2" else 0.0
            if slot.name == "mean":  # of noise, far smaller than what was summed in float32
                slack = 1e-8 * math.sqrt(float(want[MOMENTS["m2"]]) / max(1.0, float(want[MOMENTS["n"]])))
            if slot.name in ERRORS:  # d is rounded here and not there
                slack = 1e-12 * energy + 2.5e-7 * math.sqrt(energy * max(0.0, float(want[MOMENTS["ee"]])))
            assert torch.allclose(a, b, rtol=1e-5, atol=slack, equal_nan=True), (slot.name, float(a), float(b))


def assert_same_codes(found, want):
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t.nan_to_num(-1.0) for t in (a, b))
            assert torch.equal(a, b)


def look_at(x, rule, given=None, turn=0, **wanted):
    """Packed moments, and the plain kernel's codes to compare with, which the watched one's must equal."""
    room = looks.Looks(DEVICE)
    look = room.open("site", x, rule, turn)
    if given is None:
        known = amax.amax(x.contiguous())
        found = watched_tensorwise.cast(x, rule, known, look=look, **wanted)
        want = tensorwise.cast(x, rule, known, **wanted)
    else:
        scale = torch.tensor(given, device=DEVICE)
        slots = [torch.full((1,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        found = watched_tensorwise.cast_given(x, rule, scale, 1 / scale, look=look, slot=slots[0], **wanted)
        want = tensorwise.cast_given(x, rule, scale, 1 / scale, slot=slots[1], **wanted)
        assert torch.equal(*slots)
    assert_same_codes(found, want)
    sites, packed = room.pack()
    assert sites == ["site"]
    assert packed.shape == (1, MOMENTS.width)
    return packed[0], want, look


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_moments_of_a_tensor_under_its_own_scale(name, shape):
    index = NAMES.index(name)
    for dtype in DTYPES if GPU else [DTYPES[index % 2]]:
        for rule in RULES if GPU else [RULES[index % 2]]:
            x = hard(name, *shape).to(dtype)
            packed, (codes, _, scale), _ = look_at(x, rule)
            assert_packed(packed, moments(x, QTensor(codes, scale, rule.fmt, PerTensor())))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "given"), [("normal", 1e-3), ("spread", 0.5), ("not finite", 0.01), ("normal", math.nan), ("huge", 1.0)]
)
def test_moments_of_a_tensor_under_a_given_scale(name, given, shape):
    for dtype in DTYPES if GPU else [torch.bfloat16]:
        for rule in RULES if GPU else RULES[:1]:
            x = hard(name, *shape).to(dtype)
            packed, (codes, _, scale, _), _ = look_at(x, rule, given)
            want = moments(x, QTensor(codes, scale, rule.fmt, PerTensor()))
            # Squares beyond float32 beside a given scale: only what is compared with codes is lost.
            skip = {"scaled_xx", "xx", "xd", "dd", "ee", "row_sqnr", "col_sqnr"} if name == "huge" else set()
            assert_packed(packed, want, skip={*skip, "amax_ratio"})  # which the slow way is told


GRAINS = {
    "tiles": (Operand(E4M3FN, BLOCK_1x128, CURRENT_POW2), blocks.cast_tiles, watched_blocks.cast_tiles),
    "squares": (Operand(E4M3FN, BLOCK_128x128, CURRENT_POW2), blocks.cast_squares, watched_blocks.cast_squares),
    "rows": (Operand(E5M2, PerRow(), ROWWISE, margin=1), rows.cast_rows, watched_rows.cast_rows),
    "whole rows": (
        Operand(E4M3FN, PerRow(), ROWWISE),
        partial(rows.cast_rows, turned=False),
        partial(watched_rows.cast_rows, turned=False),
    ),
}


WANTED = [{}, {"plain": False}, {"turned": False}]
GRAIN_SHAPES = [(300, 700), (150, 131), (1, 1300)] if GPU else [(150, 134), (35, 131), (1, 300), (129, 1), (33, 260)]
# Squares and errors beyond float32: only what is compared with codes is lost.
COMPARED = {"scaled_xx", "flushed_xx", "xx", "xd", "dd", "ee", "row_sqnr", "col_sqnr"}


def look_at_grains(x, kind, turn=3, **wanted):
    """Packed moments of a watched cast, and the plain kernel's codes and scales, which it must equal to the bit."""
    rule, plain_cast, watched_cast = GRAINS[kind]
    room = looks.Looks(DEVICE)
    look = room.open("site", x, rule, turn, wanted.get("turned", kind != "whole rows"))
    wanted = {"plain": wanted.get("plain", True)} if kind == "whole rows" else wanted
    found = watched_cast(x, rule, look=look, **wanted)
    assert_same_codes(found, plain_cast(x, rule, **wanted))
    codes, *scales = plain_cast(x, rule)
    scale = scales[1] if kind == "squares" else scales[0]
    return room.pack()[1][0], QTensor(codes, scale, rule.fmt, rule.granularity), look


@pytest.mark.parametrize("dtype", DTYPES if GPU else [None], ids=str)
@pytest.mark.parametrize("kind", GRAINS)
@pytest.mark.parametrize("name", NAMES)
def test_moments_of_a_tensor_under_many_scales(name, kind, dtype):
    index = NAMES.index(name)
    cases = list(product([dtype] if dtype else DTYPES, WANTED, GRAIN_SHAPES))
    for kept, wanted, shape in cases if dtype else cases[index * 4 + index % 3 :: len(cases)]:
        x = hard(name, *shape).to(kept)
        packed, codes, _ = look_at_grains(x, kind, **wanted)
        # Where a scale has a floor, squares of subnormal numbers are below float32's.
        skip = COMPARED if name == "subnormal" and "rows" in kind else ()
        # A quarter of the columns of one row of ties have a ratio that is the edge itself.
        assert_packed(packed, moments(x, codes), skip=skip, edges=0.3 if name == "ties" and len(x) == 1 else 0.02)


@pytest.mark.parametrize("kind", GRAINS)
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_many_scales_and_any_strides(kind, wanted):
    for dtype in DTYPES if GPU else DTYPES[WANTED.index(wanted) :][:1]:
        wide = hard("spread", 140, 150).to(dtype)
        for x in (wide.T, wide[:, 3:140], wide[1:, 2:]) if GPU else (wide.T[:33, :130],):
            packed, codes, _ = look_at_grains(x, kind, **wanted)
            assert_packed(packed, moments(x, codes))


@pytest.mark.parametrize("kind", GRAINS)
@pytest.mark.parametrize("first", ["zero", "tiny", "NaN", "Inf"])
def test_scales_that_have_nothing_in_common(first, kind):
    """Sums wait in the unit of what a program meets first, and what is not finite spoils no other scale's numbers."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1040 if GPU else 260, 134 if GPU else 34, generator=g).to(DEVICE)
    x[140:] *= 1e25
    match first:
        case "zero":
            x[:140] = 0
        case "tiny":
            x[:140] *= 1e-25
        case "NaN":
            x[135, 3] = math.nan
        case "Inf":
            x[200, 33] = -math.inf
    for dtype in (torch.float32, torch.bfloat16) if GPU else (torch.bfloat16,):
        packed, codes, _ = look_at_grains(x.to(dtype), kind)
        assert_packed(packed, moments(x.to(dtype), codes), skip=COMPARED)


@pytest.mark.parametrize("first", ["zero", "NaN", "columns"])
@pytest.mark.parametrize(("kind", "shape"), [("whole rows", (6, 2100)), ("rows", (140, 130)), ("squares", (260, 34))])
def test_errors_are_summed_whatever_the_first_rows_are(first, kind, shape):
    """A scale that nothing is under, or that is not finite, is no unit for the sums of all others; nor are zeros."""
    x = 1e4 * torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    if first == "zero":
        x[: 128 if kind == "squares" else 1] = 0
    elif first == "columns":
        x[:, :128] = 0
    else:
        x[0, 1] = math.nan
    x = x.bfloat16()
    packed, codes, _ = look_at_grains(x, kind)
    assert_packed(packed, moments(x, codes))


@pytest.mark.parametrize("segments", [1, 2, 3, 8, 32, 112])
@pytest.mark.parametrize("bands", [1, 128, 256, 1000])
def test_the_unit_of_squares_comes_from_all_bands_and_columns(bands, segments):
    places = (np.arange(plan.UNIT_ROWS.value, dtype=np.float32) * np.float32(grains.GOLDEN.value)) % 1
    squares = np.minimum((places * bands * segments).astype(int), bands * segments - 1)
    assert len({*(squares % segments)}) > 0.6 * segments
    assert len({*(4 * (squares // segments) // bands)}) == min(bands, 4)


@pytest.mark.parametrize("mean", [0.5, 1.0, 2.0, 3.0, 5.0])
def test_the_spread_of_numbers_that_are_not_around_zero(mean):
    """Tensor cores round towards zero, which shows where squares far exceed the variance; from 4 on, float64 counts."""
    x = mean + torch.randn(512, 132, generator=torch.Generator().manual_seed(5))
    x = x.to(DEVICE).bfloat16()
    packed, (codes, _, scale), _ = look_at(x, RULES[0])
    want = moments(x, QTensor(codes, scale, E4M3FN, PerTensor()))
    assert float(packed[MOMENTS["m2"]]) == pytest.approx(float(want[MOMENTS["m2"]]), rel=5e-5 if GPU else 1e-5)


@pytest.mark.parametrize("kind", GRAINS)
def test_what_is_compared_are_the_codes_that_are_stored(kind, monkeypatch):
    """Not those that the inverse of the stored scale would make, an ulp away: beside ties, they are others."""
    rule, plain_cast, watched_cast = GRAINS[kind]
    rule = replace(rule, scaling=CURRENT)  # no scale is a power of two
    monkeypatch.setitem(GRAINS, kind, (rule, plain_cast, watched_cast))
    amax = 1 + torch.rand(4000, generator=torch.Generator().manual_seed(0))
    largest = rule.fmt.max * 2.0**-rule.margin
    amax = amax[largest / amax != 1 / (1 / (largest / amax))][:64]
    amax = amax[:1].expand(64) if kind == "squares" else amax
    steps = 2**rule.fmt.mantissa_bits
    ties = (torch.arange(steps, 2 * steps) + 0.5) / steps * (2.0 ** math.floor(math.log2(largest / 2)))
    ties = ties * (amax / largest)[:, None]
    near = (ties[..., None].view(torch.int32) + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32)
    x = torch.cat([near.flatten(1), amax[:, None], -amax[:, None]], 1).to(DEVICE)
    codes, *scales = plain_cast(x, rule)
    others = (x * (1 / scales[kind == "squares"])).to(codes.dtype)
    x = torch.where((others.float() > codes.float()) | (x.abs() == amax[:, None].to(DEVICE)), x, 0.0)
    assert int((x != 0).sum()) > 3 * 64
    packed, stored, _ = look_at_grains(x, kind)
    assert_packed(packed, moments(x, stored))
    want = moments(x, stored)
    assert float(packed[MOMENTS["dd"]]) == pytest.approx(float(want[MOMENTS["dd"]]), rel=1e-6)


@pytest.mark.parametrize("kind", GRAINS)
def test_what_is_flushed_is_known_to_the_last_bit(kind):
    rule, plain_cast, _ = GRAINS[kind]
    g = torch.Generator().manual_seed(3)
    x = torch.zeros(64, 34, device=DEVICE)
    x[:, 0] = torch.exp(4 * torch.randn(64, generator=g)).to(DEVICE)
    scale = plain_cast(x, rule)[2 if kind == "squares" else 1]
    half = 2.0 ** (-rule.fmt.bias - rule.fmt.mantissa_bits)
    near = torch.arange(-4, 29, dtype=torch.int32, device=DEVICE) // 4  # floats beside half a quantum
    x[:, 1:] = ((scale * half).expand(64, 1).contiguous().view(torch.int32) + near).view(torch.float32)
    x[:, 20:] = (x[:, 20:].view(torch.int32) & -0x10000).view(torch.float32)  # and what bfloat16 holds of them
    x[:, 27:] = ((x[:, 27:].view(torch.int32)) + 0x10000).view(torch.float32)
    for dtype in DTYPES if GPU else (torch.float32, torch.bfloat16):
        packed, codes, _ = look_at_grains(x.to(dtype), kind)
        want = moments(x.to(dtype), codes)
        assert 0 < want[MOMENTS["flushed"]] < want[MOMENTS["n"]] - 64
        assert_packed(packed, want)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_program_takes_several_whole_rows_in_turn(name, plain, monkeypatch):
    monkeypatch.setattr(looks, "plain_lines", lambda K: replace(plan.plain_lines(K), enough=1))
    for dtype in DTYPES if GPU else (torch.bfloat16,):
        x = hard(name, 37, 1300).to(dtype)
        packed, codes, look = look_at_grains(x, "whole rows", plain=plain)
        assert (look.plan.walk.rows, look.plan.steps, look.plan.programs) == (1, 16, 3)
        assert_packed(packed, moments(x, codes), skip=COMPARED if name == "subnormal" else ())


def test_rows_that_are_too_long_or_odd_are_not_held_whole():
    for K, held in ((2, True), (131, False), (2 * rows.LONGEST, True), (2 * rows.LONGEST + 2, False)):
        assert plan.plain_lines(K).whole == held
        many = plan.Plan.of(40_000, K, plan.plain_lines(K))
        assert not held or many.programs == math.ceil(40_000 / (many.walk.rows * many.steps))


@triton.jit
def _limits(inv_scale_ptr, slow_ptr, fast_ptr, HALF: tl.constexpr, POW2: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    inv_scale = tl.load(inv_scale_ptr + i)
    scale = tl.math.div_rn(tl.full((N,), 1.0, tl.float32), inv_scale)
    tl.store(slow_ptr + i, own.flush_limit(inv_scale, HALF))
    tl.store(fast_ptr + i, own.flush_limit_of(scale, inv_scale, HALF, POW2))


@pytest.mark.parametrize("half", [2.0**-10, 2.0**-17])
@pytest.mark.parametrize("pow2", [False, True])
def test_the_limit_of_flushing_without_a_division(pow2, half):
    N = 1 << 16
    g = torch.Generator().manual_seed(2)
    bits = torch.randint(0x00800000, 0x7F800000, (N,), generator=g, dtype=torch.int32)
    bits[: N // 4] = bits[: N // 4] % 0x10000000 + 0x6F800000  # whose scales are subnormal, or nearly
    bits[N // 4 : N // 2] |= 0x007FFFF8
    inv_scale = (bits & 0x7F800000 if pow2 else bits).view(torch.float32).to(DEVICE)
    slow, fast = (torch.zeros(N, dtype=torch.int32, device=DEVICE) for _ in range(2))
    _limits[(1,)](inv_scale, slow, fast, half, pow2, N)
    assert torch.equal(slow, fast)


def test_a_thread_has_as_many_words_of_a_tile_as_the_tensor_cores_are_fed():
    by_warp = 32 * EACH.value
    assert by_warp * watched_blocks.WARPS == watched_blocks.PIECE * watched_blocks.WORDS
    assert plan.TENSOR.rows * watched_tensorwise.WORDS == by_warp * watched_tensorwise.WARPS
    assert plan.LINES.rows * watched_rows.WORDS == by_warp * watched_rows.WARPS
    for W in (1, 8, 100, 2048, 7168, rows.LONGEST):
        words, together, warps = rows.whole(W, plan.HOLD, 512)
        assert words * together == by_warp * warps


def test_programs_cover_a_tensor_once_and_small_tensors_get_more_of_them():
    for walk in (plan.TENSOR, plan.TILES, plan.SQUARES, plan.LINES):
        for M, K in ((1, 1), (128, 128), (129, 4000), (5000, 300), (8192, 4096)):
            many = plan.Plan.of(M, K, walk)
            rows, columns = (walk.rows, plan.SEGMENT * many.steps)
            if walk.down:
                rows, columns = walk.rows * many.steps, plan.SEGMENT
            assert many.programs == math.ceil(M / rows) * math.ceil(K / columns)
            assert many.steps <= walk.steps
            assert many.steps == 1 or many.programs >= walk.enough
    assert plan.Plan.of(8192, 4096, plan.LINES).steps < plan.Plan.of(32768, 4096, plan.LINES).steps


def test_rows_that_repeat_are_met_in_all_their_kinds_by_every_step():
    """Heads of one token lie 16, 32 or 64 rows apart: a distance that these divide would meet one kind only."""
    for M, K in ((8192, 4096), (28672, 4096), (4096, 14336), (16384, 1024)):
        many = plan.Plan.of(M, K)
        for turn in (0, 7):
            for taken in (many.compared_rows(turn), many.sampled_rows(turn)):
                assert all(len(taken.remainder(n).unique()) == min(n, len(taken)) for n in (16, 32, 64)), (M, K)
                assert taken.max() < M
        turns = torch.cat([many.compared_rows(turn) for turn in range(many.share)])
        assert torch.equal(turns.sort().values, torch.arange(M))


@pytest.mark.parametrize("kind", ["tensor", *GRAINS])
def test_a_share_of_the_rows_is_what_the_oracle_says_of_these_rows(kind, monkeypatch):
    monkeypatch.setattr(plan, "LARGE", 1)
    monkeypatch.setattr(plan, "SAMPLE", 1 << 12)
    plan.Plan.of.cache_clear()
    M, K = (2048, 256) if GPU and kind == "tensor" else (1024, 34)
    x, rule = hard("spread", M, K).to(torch.bfloat16), RULES[0]
    if kind == "tensor":
        packed, (codes, _, scale), look = look_at(x, rule, turn=5)
        all_of_it = moments(x, QTensor(codes, scale, rule.fmt, PerTensor())).cpu()
        granularity, scales = PerTensor(), scale.expand(M, 1)
    else:  # columns of one block: every grain is one of rows
        packed, q, look = look_at_grains(x, kind, turn=5)
        all_of_it, codes, rule = moments(x, q).cpu(), q.codes, GRAINS[kind][0]
        granularity, scales = PerRow(), q.scale.repeat_interleave(M // len(q.scale), 0)

    def oracle(rows):
        scale = scales[0, 0] if kind == "tensor" else scales[rows]
        return moments(x[rows], QTensor(codes[rows], scale, rule.fmt, granularity)).cpu()

    compared, sampled = look.plan.compared_rows(5).to(DEVICE), look.plan.sampled_rows(5).to(DEVICE)
    assert len(compared) == len(range(5, M, plan.SHARE))
    assert len(sampled) < M
    some, few = oracle(compared), oracle(sampled)
    want = all_of_it.clone()
    for name in ("scaled_xx", "flushed_xx", "xx", "xd", "dd", "ee"):
        want[MOMENTS[name]] = some[MOMENTS[name]] * M / len(compared)
    for name in ("row_sqnr", "col_sqnr"):
        want[MOMENTS[name]] = some[MOMENTS[name]]
    for name in ("sample_n", "sample_mean", "sample_m2", "sample_m3", "sample_m4", "exponents", "block_range"):
        want[MOMENTS[name]] = few[MOMENTS[name]]
    assert_packed(packed, want)


@pytest.mark.parametrize("wanted", [{"turned": False}, {"plain": False}], ids=str)
def test_one_layout_and_any_strides(wanted):
    wide = hard("spread", 70, 60)
    for x in (wide.T, wide[:, 3:40]) if GPU else (wide.T[:33],):
        packed, _, _ = look_at(x, RULES[0], **wanted)
        codes, _, scale = tensorwise.cast(x, RULES[0], amax.amax(x.contiguous()))
        assert_packed(packed, moments(x, QTensor(codes, scale, E4M3FN, PerTensor())))


def test_what_is_counted_is_float32_whatever_the_program_s_default_is():
    x = hard("normal", 70, 60).to(torch.bfloat16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        room = looks.Looks(DEVICE)
        quantize.count(x, RULES[0], room.open("site", x, RULES[0], 0, turned=False))
        packed = room.pack()[1][0]
    finally:
        torch.set_default_dtype(before)
    codes, _, scale = tensorwise.cast(x, RULES[0], amax.amax(x))
    assert_packed(packed, moments(x, QTensor(codes, scale, E4M3FN, PerTensor())))


@pytest.mark.parametrize("recipe", [CURRENT_RECIPE, ROWWISE_RECIPE, BLOCKWISE], ids=["tensor", "rows", "blocks"])
def test_a_view_whose_numbers_are_negated(recipe):
    rule, _ = recipe.uses("input")
    x = torch.randn(40, 256, device=DEVICE) + 1
    negated, want = torch._neg_view(x), (-x).contiguous()
    codes = [quantize.quantize_both(y, rule, None, shared=False)[0].codes.float() for y in (negated, want)]
    assert torch.equal(*codes)
    room = looks.Looks(DEVICE)
    for turn in range(4):  # in the last ones by launches that are made again
        for site, y in (("seen", negated), ("wanted", want)):
            look = room.open(f"{site}:input", y, rule, turn, turned=False)
            quantize.count(y, rule, look)
        _, packed = room.pack()
        room.clear()
        assert torch.equal(packed[0].nan_to_num(), packed[1].nan_to_num())
        assert packed[0, MOMENTS["mean"]].item() < 0


def test_a_step_has_many_looks_and_the_next_one_the_same_addresses():
    x, rule = hard("normal", 20, 40), RULES[0]
    room = looks.Looks(DEVICE)
    known = amax.amax(x)
    addresses = []
    for step in range(2):
        for site in ("a", "b"):
            look = room.open(site, x if site == "a" else 2 * x, rule, step)
            watched_tensorwise.cast(x if site == "a" else 2 * x, rule, known if site == "a" else 2 * known, look=look)
            addresses.append(look.room.data_ptr())
        sites, packed = room.pack()
        assert sites == ["a", "b"]
        assert packed[:, MOMENTS["amax"]].tolist() == [known.item(), 2 * known.item()]
        assert packed[:, MOMENTS["amax_ratio"]].tolist() == [-math.inf, -math.inf]
        room.clear()
    assert addresses[:2] == addresses[2:]
    assert room.pack()[1].shape == (0, MOMENTS.width)


def test_a_given_scale_leaves_the_ratio_of_amaxes():
    x, rule = hard("normal", 20, 40), RULES[1]
    room, scale = looks.Looks(DEVICE), torch.tensor(1e-3, device=DEVICE)
    look = room.open("site", x, rule, 0)
    watched_tensorwise.cast_given(x, rule, scale, scale.reciprocal(), look=look)
    assert room.pack()[1][0, MOMENTS["amax_ratio"]] == amax_ratio(x.abs().max(), scale, rule)


@pytest.mark.parametrize("recipe", [CURRENT_RECIPE, DELAYED, ROWWISE_RECIPE, BLOCKWISE], ids=lambda r: r.name)
def test_the_backend_fills_a_look_whatever_the_rule(recipe):
    x = hard("spread", 40, 130)
    for role in ROLES:
        rule, rule_T = recipe.uses(role)
        given = None
        if recipe.state != "none":
            given = Given(torch.tensor(0.01, device=DEVICE), torch.tensor(100.0, device=DEVICE))
        room = looks.Looks(DEVICE)
        look = room.open("site", x, rule, 0)
        plain = {"shared": recipe.shares(role), "given": given}
        found = quantize.quantize_both(x, rule, rule_T, look=look, **plain)
        for a, b in zip(found[:2], quantize.quantize_both(x, rule, rule_T, **plain)[:2], strict=True):
            assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
            assert torch.equal(a.scale, b.scale)
        assert_packed(room.pack()[1][0], moments(x, found.plain), skip=("amax_ratio",))


def test_a_look_that_no_kernel_can_fill_is_not_opened():
    room, rule = looks.Looks(DEVICE), RULES[0]
    x = torch.zeros(4, 4, device=DEVICE)
    assert room.open("site", x.double(), rule, 0) is None
    assert room.open("site", x[:0], rule, 0) is None
    assert room.open("site", x, Operand(E4M3FN, BLOCK_1x32, CURRENT_POW2), 0) is None


def test_another_shape_takes_the_place_of_the_first(monkeypatch):
    monkeypatch.setattr(looks, "LOOKS", 2)
    room, rule = looks.Looks(DEVICE), RULES[0]
    small, large = torch.zeros(4, 4, device=DEVICE), torch.zeros(400, 400, device=DEVICE)
    first = room.open("a", small, rule, 0)
    second = room.open("b", small, rule, 0)
    room.clear()
    assert room.open("a", small, rule, 0) is first
    other = room.open("b", large, rule, 0)
    assert other is not second
    assert other.room.data_ptr() == second.room.data_ptr()
    with pytest.raises(UsageError, match="room for 2 looks"):
        room.open("c", small, rule, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs CUDA")
def test_a_captured_step_fills_its_looks_again_and_nothing_waits():
    rule, x = RULES[0], hard("spread", 2048, 512).to(torch.bfloat16)
    room, known = looks.Looks(DEVICE), amax.amax(x)

    def step():
        room.clear()
        for turn in range(2):
            look = room.open("site", x, rule, turn)
            watched_tensorwise.cast(x, rule, known, look=look)
        return room.pack()[1]

    step()
    torch.cuda.synchronize()
    with no_waiting():
        want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = step()
    packed.zero_()
    graph.replay()
    assert torch.equal(packed, want)
    warnings.simplefilter("ignore")  # torch's, of a graph of nothing
    with pytest.raises(UsageError, match="more room while a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        room.reserve(1 << 24)
