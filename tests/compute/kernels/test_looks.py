"""What watched kernels gather while they quantize is what the slow oracle counts; codes are the plain kernels'."""

import math
from functools import partial

import pytest
import torch
from tests.compute.kernels.hard import DTYPES
from tests.compute.kernels.hard import NAMES as HARD
from tests.compute.kernels.hard import hard as hardest

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.scale_table import amax_ratio
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

from narrowgauge.compute.kernels.fused import (
    amax,
    blocks,
    looks,
    plan,
    quantize,
    rows,
    tensorwise,
    watched_blocks,
    watched_rows,
    watched_tensorwise,
)

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
    monkeypatch.setattr(plan, "SAMPLE", 1 << 30)
    plan.Plan.of.cache_clear()
    yield
    plan.Plan.of.cache_clear()


hard = partial(hardest, binades=40)  # whose squares are float32 too
NAMES = [*HARD, "far from zero"]


def assert_packed(found, want, share=1.0, skip=()):
    """Counts equal, sums to 1e-5, histograms but for lines on the edge of two bins."""
    found, want = found.cpu(), want.cpu()
    energy = float(want[MOMENTS["xx"]]) * share
    for slot in MOMENTS.slots:
        if slot.name in skip:
            continue
        a, b = found[MOMENTS[slot.name]], want[MOMENTS[slot.name]]
        if slot.width > 1:
            edge = 0.02 * float(b.sum()) + 2 if "sqnr" in slot.name else 0
            assert float((a - b).abs().sum()) <= edge, slot.name
            assert float(a.sum()) == float(b.sum()), slot.name
        elif slot.name in EXACT:
            assert torch.equal(a, b), (slot.name, a, b)
        else:
            slack = 1e-6 * float(want[MOMENTS["scale_mean"]]) ** 2 if slot.name == "scale_m2" else 0.0
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
}


@pytest.mark.parametrize("shape", [(150, 134), (300, 700)] if GPU else [(35, 134)], ids=str)
@pytest.mark.parametrize("kind", GRAINS)
@pytest.mark.parametrize("name", NAMES if GPU else ["spread", "not finite"])
def test_moments_of_a_tensor_under_many_scales(name, kind, shape):
    rule, plain_cast, watched_cast = GRAINS[kind]
    for dtype in DTYPES if GPU else [torch.bfloat16]:
        x = hard(name, *shape).to(dtype)
        room = looks.Looks(DEVICE)
        look = room.open("site", x, rule, 3)
        found = watched_cast(x, rule.fmt, rule.scaling, rule.margin, look=look)
        want = plain_cast(x, rule.fmt, rule.scaling, rule.margin)
        assert_same_codes(found, want)
        scale = want[2] if kind == "squares" else want[1]
        q = QTensor(want[0], scale, rule.fmt, rule.granularity)
        assert_packed(room.pack()[1][0], moments(x, q))


def test_a_share_of_the_rows_is_what_the_oracle_says_of_these_rows(monkeypatch):
    monkeypatch.setattr(plan, "LARGE", 1)
    monkeypatch.setattr(plan, "SAMPLE", 1 << 12)
    plan.Plan.of.cache_clear()
    M, K = (2048, 256) if GPU else (1024, 34)
    x, rule = hard("spread", M, K).to(torch.bfloat16), RULES[0]
    packed, (codes, _, scale), look = look_at(x, rule, turn=5)
    all_of_it = moments(x, QTensor(codes, scale, rule.fmt, PerTensor())).cpu()
    compared, sampled = look.plan.compared_rows(5).to(DEVICE), look.plan.sampled_rows(5).to(DEVICE)
    assert len(compared) == M // plan.SHARE
    assert len(sampled) < M
    some = moments(x[compared], QTensor(codes[compared], scale, rule.fmt, PerTensor())).cpu()
    few = moments(x[sampled], QTensor(codes[sampled], scale, rule.fmt, PerTensor())).cpu()
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = step()
    packed.zero_()
    graph.replay()
    assert torch.equal(packed, want)
    with pytest.raises(UsageError, match="more room while a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        room.reserve(1 << 24)
