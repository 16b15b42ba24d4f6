"""One scale per tensor: from its own amax, or given while the amax is found on the way."""

import math

import pytest
import torch
from tests.compute.kernels.hard import DEVICE, DTYPES, NAMES, hard

from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, PerTensor, quantize
from narrowgauge.compute.quant.quantize import scales_for
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN, E5M2

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused import tensorwise, tile

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
RULES = {
    "E4M3": Operand(E4M3FN, PerTensor(), CURRENT),
    "E5M2, margin": Operand(E5M2, PerTensor(), CURRENT, margin=2),
    "E4M3, power of two": Operand(E4M3FN, PerTensor(), CURRENT_POW2),
}
SCALES = [0.5, 1e-3, 2.0**-128, 1e-30, 1e30, 0.0, -1.0, math.inf, math.nan]


def number(value):
    return torch.tensor(value, dtype=torch.float32, device=DEVICE)


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def assert_codes(found_MK, found_KM, want_MK):
    for found, want in ((found_MK, want_MK), (found_KM, want_MK.T)):
        if found is not None:
            assert found.is_contiguous()
            none = want.float().isnan()  # a NaN's sign says nothing
            assert torch.equal(found.float().isnan(), none)
            assert torch.equal(found.view(torch.uint8)[~none], want.contiguous().view(torch.uint8)[~none])


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("name", NAMES)
def test_cast_makes_inv_scale_and_scale_of_the_amax(name, rule):
    for dtype in DTYPES:
        for shape in ((150, 134), (130, 133)):
            x = hard(name, *shape).to(dtype)
            amax = x.float().abs().max()
            want = quantize(x, rule.fmt, scaling=rule.scaling, margin=rule.margin, amax=amax)
            codes_MK, codes_KM, scale = tensorwise.cast(x, rule, amax)
            assert scale.shape == ()
            assert same(scale, want.scale)
            assert_codes(codes_MK, codes_KM, want.codes)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 3.0, 3e38, math.inf, math.nan])
def test_cast_takes_any_amax_even_one_that_x_does_not_have(amax):
    x, rule = hard("ties", 64, 64), RULES["E4M3"]
    want = quantize(x, rule.fmt, amax=number(amax))
    codes_MK, codes_KM, scale = tensorwise.cast(x, rule, number(amax))
    assert same(scale, want.scale)
    assert_codes(codes_MK, codes_KM, want.codes)


@pytest.mark.parametrize("name", ["spread", "ties", "subnormal", "huge", "zeros", "not finite"])
@pytest.mark.parametrize("rule", [RULES["E4M3"], RULES["E5M2, margin"]], ids=["E4M3", "E5M2"])
def test_a_given_scale_and_the_amax_on_the_way(name, rule):
    scratch = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for dtype in DTYPES:
        tensors = {shape: hard(name, *shape).to(dtype) for shape in ((150, 134), (40, 34))}
        for value in SCALES:
            # Programs see a scale alike, many or one: interpreted, many take one that can be used and one that cannot.
            x = tensors[150, 134] if DEVICE == "cuda" or value in (1e-3, 0.0) else tensors[40, 34]
            amax = x.float().abs().max()
            given = number(value)
            usable = 0 < value < math.inf
            inv_scale = given.reciprocal().clamp(max=torch.finfo(torch.float32).max) if usable else number(7.0)
            want_scale, want_inv = scales_for(amax, rule.fmt, scale=given, inv_scale=inv_scale)
            want = (x.float() * want_inv).clamp(-rule.fmt.max, rule.fmt.max)
            codes_MK, codes_KM, scale, found = tensorwise.cast_given(x, rule, given, inv_scale, scratch=scratch)
            assert (scale.shape, found.shape) == ((), ())
            assert same(found, amax)
            assert same(scale, want_scale)
            assert_codes(codes_MK, codes_KM, want.to(codes_MK.dtype))
            assert scratch.tolist() == [0, 0]  # ready for the next call


def test_the_slot_takes_the_largest_finite_amax_and_forgets_none():
    rule, one = RULES["E4M3"], number(1.0)
    slot = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    seen = []
    for largest in (2.0, 5.0, math.inf, 3.0, math.nan, 0.0):
        x = torch.zeros(200, 300, device=DEVICE)
        x[130, 290] = -largest
        tensorwise.cast_given(x, rule, one, one, slot=slot)
        seen.append(slot.view(torch.float32).item())
    assert seen == [2, 5, 5, 5, 5, 5]
    slot = torch.full((1,), -1.0, device=DEVICE)  # as the bits of a float
    tensorwise.cast_given(torch.zeros(0, 16, device=DEVICE), rule, one, one, slot=slot.view(torch.int32))
    assert slot == -1
    tensorwise.cast_given(torch.zeros(16, 16, device=DEVICE), rule, one, one, slot=slot.view(torch.int32))
    assert slot == 0


def test_only_the_layouts_that_are_asked_for():
    x, rule, one = hard("normal", 100, 60), RULES["E4M3"], number(1.0)
    for call in (
        lambda **wanted: tensorwise.cast(x, rule, one, **wanted),
        lambda **wanted: tensorwise.cast_given(x, rule, one, one, **wanted),
    ):
        both = call()
        assert both[2] == (1 / torch.tensor(448.0) if len(both) == 3 else 1)
        for plain, turned in ((True, False), (False, True), (False, False)):
            found = call(plain=plain, turned=turned)
            assert [codes is not None for codes in found[:2]] == [plain, turned]
            assert_codes(found[0], found[1], both[0])
            assert torch.equal(torch.stack(found[2:]), torch.stack(both[2:]))


def test_a_tensor_without_elements_still_has_a_scale():
    x, rule = torch.zeros(0, 16, device=DEVICE), RULES["E4M3"]
    assert tensorwise.cast(x, rule, number(0.0))[2] == 1
    assert tensorwise.cast(x, rule, number(math.nan))[2].isnan()
    codes_MK, codes_KM, scale, amax = tensorwise.cast_given(x, rule, number(2.0), number(0.5))
    assert (codes_MK.shape, codes_KM.shape, scale, amax) == ((0, 16), (16, 0), 2, 0)


def test_what_lies_evenly_in_memory_is_loaded_by_the_word_and_the_rest_copied_first():
    def loaded(x):
        found, W, stride_m, stride_w, kind = tile.even(x)
        assert torch.equal(found, x)
        assert x.shape[1] + x.shape[1] % 2 == 2 * W
        assert found.stride() == ((2 * stride_m, stride_w) if kind else (stride_m, stride_w))
        return kind, found is x

    x = torch.zeros(8, 64)
    assert [loaded(x.to(dtype)) for dtype in DTYPES] == [(kind, True) for kind in (1, 2, 3)]
    assert loaded(x[:, 2:]) == loaded(x[::3]) == loaded(x[:, :62]) == (1, True)
    for uneven in (x[:, 1:63], x.T, x[:, :1].expand(8, 64), torch.zeros(8, 63)[:, :62]):
        assert loaded(uneven) == (1, False)
    assert loaded(x[:, 1:]) == loaded(x[:, 1::3]) == (0, True)
