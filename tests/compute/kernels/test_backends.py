"""Backends: the same product from the same codes, and honest answers about what they cannot do."""

import pytest
import torch

from narrowgauge.compute.kernels import BACKENDS, choose, scaled_mm
from narrowgauge.compute.quant import PerTensor, QTensor, quantize
from narrowgauge.compute.recipes import BLOCKWISE, CATALOG, CURRENT, MXFP8, ROWWISE, fake
from narrowgauge.errors import RecipeError, ShapeError
from narrowgauge.formats import E4M3FN

CPU = torch.device("cpu")
REFERENCE, SCALED_MM = BACKENDS["reference"], BACKENDS["scaled_mm"]


def able(backend, recipe):
    reason = backend.supports(recipe, CPU)
    if reason is not None:
        pytest.skip(reason)


def operands(recipe, gemm, p=33, q=48, c=160, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pair = []
    for rule, rows in ((getattr(recipe, gemm).a, p), (getattr(recipe, gemm).b, q)):
        x = torch.randn(rows, c, generator=generator)
        pair.append(quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling))
    return pair


def calc_diff(x, y):
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_reference_is_the_product_of_the_dequantized_operands(recipe, gemm):
    a, b = operands(recipe, gemm)
    bias = torch.linspace(-3, 3, 48)
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).T + bias
    got = REFERENCE.gemm(a, b, torch.float32, bias=bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", [CURRENT, ROWWISE], ids=lambda r: r.name)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scaled_mm_agrees_with_the_reference(recipe, gemm, dtype):
    able(SCALED_MM, recipe)
    a, b = operands(recipe, gemm)
    bias = torch.randn(48)
    got, want = (backend.gemm(a, b, dtype, bias=bias) for backend in (SCALED_MM, REFERENCE))
    assert got.dtype == want.dtype == dtype
    assert calc_diff(want, got) < 1e-5


@pytest.mark.parametrize("recipe", [CURRENT, ROWWISE], ids=lambda r: r.name)
def test_scaled_mm_pads_a_ragged_token_count(recipe):
    able(SCALED_MM, recipe)
    # wgrad contracts over tokens, and its operands arrive as transposed views.
    x, dy = torch.randn(37, 64), torch.randn(37, 32)
    rules = recipe.wgrad
    a = quantize(dy, rules.a.fmt, rules.a.granularity.transposed(), scaling=rules.a.scaling).T
    b = quantize(x, rules.b.fmt, rules.b.granularity.transposed(), scaling=rules.b.scaling).T
    assert calc_diff(REFERENCE.gemm(a, b, torch.float32), SCALED_MM.gemm(a, b, torch.float32)) < 1e-10


def test_scales_of_rows_may_lie_in_memory_as_a_line():
    able(SCALED_MM, ROWWISE)
    a, b = operands(ROWWISE, "fprop", p=32)
    lines = [
        QTensor(q.codes, q.scale.as_strided(q.scale.shape, (1, len(q.scale))), q.fmt, q.granularity) for q in (a, b)
    ]
    assert [q.scale.stride() for q in lines] == [(1, 32), (1, 48)]
    assert torch.equal(SCALED_MM.gemm(*lines, torch.float32), SCALED_MM.gemm(a, b, torch.float32))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=lambda b: b.name)
def test_empty_operands(backend):
    a, b = operands(CURRENT, "fprop", p=0)
    assert backend.gemm(a, b, torch.bfloat16, bias=torch.ones(48)).shape == (0, 48)
    a, b = operands(CURRENT, "fprop", c=0)
    assert backend.gemm(a, b, torch.float32).tolist() == torch.zeros(33, 48).tolist()


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=lambda b: b.name)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_poisoned_operand_leaves_a_non_finite_result(backend, bad):
    x, w = torch.randn(16, 64), torch.randn(32, 64)
    x[3, 5] = bad
    for recipe in CATALOG.values():
        if backend.supports(recipe, CPU) is None:
            q = [
                quantize(t, r.fmt, r.granularity, scaling=r.scaling)
                for t, r in ((x, recipe.fprop.a), (w, recipe.fprop.b))
            ]
            assert not backend.gemm(*q, torch.bfloat16)[3].isfinite().any()


def test_tiny_scales_do_not_underflow():
    codes = torch.full((16, 16), 448.0).to(torch.float8_e4m3fn)
    tiny = torch.tensor(1e-22)
    a = QTensor(codes, tiny, E4M3FN, PerTensor())
    got = REFERENCE.gemm(a, a, torch.float32)  # 1e-44 alone is a subnormal with one digit
    assert float(got[0, 0]) == pytest.approx(16 * 448.0**2 * 1e-44, rel=1e-6, abs=0)


def test_different_contractions_are_refused():
    (a, _), (_, b) = operands(CURRENT, "fprop", c=64), operands(CURRENT, "fprop", c=32)
    for backend in BACKENDS.values():
        with pytest.raises(ShapeError) as caught:
            backend.gemm(a, b, torch.float32)
        assert str(caught.value) == (
            "a is [33, 64] and b is [48, 32]; both must end in the contracted dimension. "
            "Transpose one of them (`.T`) before the product."
        )


def test_fake_multiplies_in_the_output_dtype():
    a, b = operands(CURRENT, "fprop")
    want = a.dequantize(torch.bfloat16) @ b.dequantize(torch.bfloat16).T
    for backend in BACKENDS.values():
        assert torch.equal(backend.gemm(a, b, torch.bfloat16, fake=True), want)


def test_shapes_that_must_stay_high_are_known_beforehand():
    for backend in BACKENDS.values():
        assert backend.refuses(CURRENT, 32, 48) is None
        assert backend.refuses(CURRENT, 30, 48) == "N=30 is not a multiple of 16, which FP8 gemms need"
        assert backend.refuses(ROWWISE, 32, 50) == "K=50 is not a multiple of 16, which FP8 gemms need"
    assert REFERENCE.refuses(BLOCKWISE, 192, 128) is None
    assert SCALED_MM.refuses(BLOCKWISE, 192, 128) == "N=192 is not a multiple of 128, which blockwise gemms need"


def test_scaled_mm_says_why_not():
    assert SCALED_MM.supports(CURRENT, CPU) is None
    assert SCALED_MM.supports(BLOCKWISE, CPU) == "blockwise gemms exist only on CUDA"
    assert SCALED_MM.supports(MXFP8, CPU) == (
        "fprop: Block(rows=1, cols=32) by Block(rows=1, cols=32) has no native gemm here"
    )
    assert SCALED_MM.supports(CURRENT.with_(input="E5M2"), CPU) == (
        "wgrad: E5M2 by E5M2 is not supported by tensor cores; make one operand E4M3FN"
    )
    assert SCALED_MM.supports(CURRENT.with_(weight="E4M3FNUZ"), CPU) == "fprop: E4M3FNUZ is a format of AMD GPUs"
    assert SCALED_MM.supports(CURRENT, torch.device("mps")) == "torch has no FP8 gemm on 'mps' devices"


@pytest.mark.parametrize("older", [True, False])
def test_a_torch_whose_cpu_takes_one_scale_per_tensor_only_is_found_out_by_trying(monkeypatch, older):
    def product(a, b, scale_a, scale_b, **other):
        if older and scale_a.numel() > 1:
            raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")
        return torch.zeros(16, 16)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(scaled_mm, "_cpu_takes_rows", scaled_mm._cpu_takes_rows.__wrapped__)
    want = f"on a CPU, torch {torch.__version__} multiplies with one scale per tensor only" if older else None
    assert SCALED_MM.supports(ROWWISE, CPU) == want
    assert SCALED_MM.supports(CURRENT, CPU) is None


@pytest.mark.parametrize(
    ("capability", "cuda", "recipe", "reason"),
    [
        ((9, 0), "13.0", CURRENT, None),
        ((9, 0), "12.9", BLOCKWISE, None),
        ((8, 9), "12.9", CURRENT, None),
        ((8, 0), "12.9", CURRENT, "this GPU has compute capability 8.0; FP8 tensor cores begin at 8.9"),
        (
            (9, 0),
            "12.8",
            BLOCKWISE,
            "blockwise gemms need compute capability 9.0 and CUDA 12.9; this is 9.0 with CUDA 12.8",
        ),
        (
            (10, 0),
            "13.0",
            BLOCKWISE,
            "blockwise gemms need compute capability 9.0 and CUDA 12.9; this is 10.0 with CUDA 13.0",
        ),
    ],
)
def test_what_each_gpu_can_run(monkeypatch, capability, cuda, recipe, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    device = torch.device("cuda", 0)
    assert SCALED_MM.supports(recipe, device) == reason
    backend, why = choose(recipe, device)
    if reason is None:
        assert (backend.name, why) == ("fused", "native FP8 tensor cores on Some GPU")
        with monkeypatch.context() as without:
            without.setattr("importlib.util.find_spec", lambda name: None)
            assert BACKENDS["fused"].supports(recipe, device) == "triton is not installed"
            assert choose(recipe, device)[0].name == "scaled_mm"
    else:
        assert (backend.name, why) == ("reference", f"emulated: {reason}")


def test_choose_reports_and_never_replaces_a_request():
    backend, why = choose(CURRENT, CPU)
    assert backend.name == "reference"
    assert why.startswith("emulated: no FP8 tensor cores on 'cpu'")
    assert choose(CURRENT, CPU, "scaled_mm") == (SCALED_MM, "requested")
    assert "there is no FP8 gemm to choose" in choose(fake(CURRENT), CPU)[1]
    with pytest.raises(RecipeError) as caught:
        choose(BLOCKWISE, CPU, "scaled_mm")
    assert str(caught.value) == (
        "backend 'scaled_mm' cannot run recipe 'blockwise' on 'cpu': blockwise gemms exist only on CUDA. "
        "Use backend='reference', which emulates it, or another recipe."
    )
    with pytest.raises(RecipeError, match="no backend is called 'refrence'; did you mean 'reference'"):
        choose(CURRENT, CPU, "refrence")


def test_block_scales_are_laid_out_as_cublas_reads_them():
    from narrowgauge.compute.kernels import scaled_mm

    tile = torch.arange(37 * 3.0).reshape(37, 3)
    laid = scaled_mm._tile_scale(tile, 48)
    assert (laid.shape, laid.stride()) == ((48, 3), (1, 48))
    assert torch.equal(laid[:37], tile)
    for rows, blocks in ((2, 3), (1, 4), (4, 1)):
        square = torch.arange(float(rows * blocks)).reshape(blocks, rows).t()
        laid = scaled_mm._square_scale(square)
        assert (laid.shape, laid.stride()) == ((4, rows), (1, 4))
        assert torch.equal(laid[:blocks], square.t())
