"""Our own kernels give the reference's codes and scales, bit for bit: interpreted here, compiled on a GPU."""

import math

import pytest
import torch
from tests.compute.kernels.hard import DEVICE, DTYPES, NAMES, hard

from narrowgauge.compute.kernels.both import Given
from narrowgauge.compute.kernels.both import quantize_both as by_reference
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, ROWWISE, BLOCK_1x128, BLOCK_128x128, PerRow, PerTensor
from narrowgauge.compute.recipes import CATALOG, ROLES, Operand
from narrowgauge.formats import E4M3FN, E5M2

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused import amax, quantize, rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
SHAPES = [(256, 128), (150, 133), (1, 300), (129, 1)]


RULES = {
    "tensor": Operand(E4M3FN, PerTensor(), CURRENT),
    "tensor, E5M2, margin": Operand(E5M2, PerTensor(), CURRENT, margin=2),
    "row": Operand(E4M3FN, PerRow(), ROWWISE),
    "row, E5M2, margin": Operand(E5M2, PerRow(), ROWWISE, margin=1),
    "tiles": Operand(E4M3FN, BLOCK_1x128, CURRENT_POW2),
    "squares": Operand(E4M3FN, BLOCK_128x128, CURRENT_POW2),
}


def assert_same(found, want):
    assert (found is None) == (want is None)
    if want is not None:
        assert (found.fmt, found.granularity, found.shape) == (want.fmt, want.granularity, want.shape)
        assert found.codes.is_contiguous()  # as the gemm wants them
        codes = [q.codes.contiguous().view(torch.uint8) for q in (found, want)]
        none = want.codes.float().isnan()  # a NaN's sign says nothing
        assert torch.equal(found.codes.float().isnan(), none)
        assert torch.equal(codes[0][~none], codes[1][~none])
        assert torch.equal(found.scale.contiguous().view(torch.int32), want.scale.contiguous().view(torch.int32)) or (
            torch.equal(found.scale.isnan(), want.scale.isnan())
            and torch.equal(found.scale.nan_to_num(), want.scale.nan_to_num())
        )


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("name", NAMES)
def test_bit_equal_on_hard_numbers(name, rule):
    shared = rule.granularity in (PerTensor(), BLOCK_128x128)
    for dtype in DTYPES:
        x = hard(name, 150, 133).to(dtype)
        found = quantize.quantize_both(x, rule, rule, shared=shared)
        for q, want in zip(found[:2], by_reference(x, rule, rule, shared=shared)[:2], strict=True):
            assert_same(q, want)


@pytest.mark.parametrize("rule", ["row", "row, E5M2, margin"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_rows_are_cast_in_one_read_and_longer_ones_in_two(name, rule):
    launches = []
    for M, K in ((150, 134), (3, 2048), (2, 2 * rows.LONGEST), (2, 2 * rows.LONGEST + 2)):
        for dtype in DTYPES:
            x = hard(name, M, K).to(dtype)
            found = quantize.quantize_both(x, RULES[rule], None, shared=False)
            assert_same(found.plain, by_reference(x, RULES[rule], None, shared=False).plain)
        launches.append(1 if rows.RowCast(x, RULES[rule], True, False)._amaxes is None else 2)
    assert launches == [1, 1, 1, 2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_every_recipe_role_and_shape(recipe, shape):
    for role in ROLES:
        rule, rule_T = recipe.uses(role)
        x = hard("spread", *shape)
        for plain, turned in ((rule, rule_T), (rule, None), (None, rule_T)):
            found = quantize.quantize_both(x, plain, turned, shared=recipe.shares(role))
            for q, want in zip(found[:2], by_reference(x, plain, turned, shared=recipe.shares(role))[:2], strict=True):
                if want is None or recipe.fprop.a.scaling.e8m0 is None:
                    assert_same(q, want)
                else:  # no kernel of ours: the reference itself
                    assert torch.equal(q.codes.view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_strides_do_not_matter(rule):
    wide = hard("spread", 300, 150)
    shared = rule.granularity in (PerTensor(), BLOCK_128x128)
    for x in (wide.T, wide[::2], wide[:, 3:140], wide[:1].expand(40, 150)):
        found = quantize.quantize_both(x, rule, rule, shared=shared)
        for q, want in zip(found[:2], by_reference(x.contiguous(), rule, rule, shared=shared)[:2], strict=True):
            assert_same(q, want)


def test_a_given_scale_is_used_and_a_poisoned_one_shows():
    rule, x = RULES["tensor"], hard("spread", 64, 64)
    for scale in (0.5, 1e-3, math.nan, math.inf):
        value = torch.tensor(scale, device=DEVICE)
        given = Given(value, value.reciprocal())
        found = quantize.quantize_both(x, rule, rule, shared=True, given=given)
        wanted = by_reference(x, rule, rule, shared=True, given=given)
        assert found.amax == wanted.amax
        for q, want in zip(found[:2], wanted[:2], strict=True):
            assert_same(q, want)
        assert found[0].scale.isnan().item() == (not math.isfinite(scale))


@pytest.mark.parametrize("n", [1, 7, 8192, 70_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_of_any_length(dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE, dtype)
    assert amax.amax(x) == x.abs().max().float()
    x[n // 2] = -math.inf
    assert amax.amax(x) == math.inf
    x[n - 1] = math.nan
    assert amax.amax(x).isnan()


def test_one_amax_knows_nothing_of_the_one_before():
    for largest in (3.0, math.nan, 1.0):
        x = torch.zeros(40_000, device=DEVICE)
        x[-1] = -largest
        found = amax.amax(x)
        assert found == largest or (math.isnan(largest) and found.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amaxes_that_share_a_scratch_leave_it_as_it_was(dtype):
    out, scratch = torch.full((), 7.0, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for n, largest in ((40_000, 3.0), (70_001, math.nan), (1, 0.5), (8192, math.inf), (40_000, 1.0), (0, 0.0)):
        x = torch.zeros(n, device=DEVICE, dtype=dtype)
        x[-1:] = -largest
        found = amax.amax(x, out, scratch)
        assert found is out
        assert found == largest or (math.isnan(largest) and found.isnan())
        assert scratch.tolist() == [0, 0]


def test_kernels_write_float32_whatever_the_program_s_default_is():
    x = torch.randn(33, 130, device=DEVICE) / 3
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        largest = amax.amax(x)
        found = {name: quantize.quantize_both(x, rule, None, shared=False).plain for name, rule in RULES.items()}
        turned = quantize.quantize_both(x, None, RULES["row"], shared=False).turned
    finally:
        torch.set_default_dtype(before)
    assert largest.dtype == torch.float32
    assert largest == x.abs().max()
    for name, q in found.items():
        assert_same(q, by_reference(x, RULES[name], None, shared=False).plain)
    assert_same(turned, by_reference(x, None, RULES["row"], shared=False).turned)


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda fmt: fmt.name)
def test_powers_of_two_beside_every_binade(fmt, margin):
    tops = torch.ldexp(torch.tensor(fmt.max, dtype=torch.float64), torch.arange(-160.0, 121.0)).float()
    beside = torch.stack([tops.nextafter(tops * 0), tops, tops.nextafter(tops * 2), tops * 0.8, tops * 1.3], 1)
    x = torch.zeros(beside.numel(), 128)
    x[:, 5] = beside.flatten()
    x[3, 7], x[9, 11] = math.inf, math.nan
    rule = Operand(fmt, BLOCK_1x128, CURRENT_POW2, margin=margin)
    found = quantize.quantize_both(x.to(DEVICE), rule, None, shared=False)
    assert_same(found.plain, by_reference(x.to(DEVICE), rule, None, shared=False).plain)


def test_amax_of_nothing_is_zero():
    assert amax.amax(torch.zeros(0, 5, device=DEVICE)) == 0
    x = torch.zeros(0, 16, device=DEVICE)
    plain, turned, _ = quantize.quantize_both(x, RULES["tensor"], RULES["tensor"], shared=True)
    assert (plain.shape, turned.shape) == ((0, 16), (16, 0))
