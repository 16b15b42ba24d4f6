"""torch's own FP8 gemm: tensor cores on CUDA, a slow but independent check on CPU.

    tensorwise   torch._scaled_mm, scales []                                      sm_89, sm_90 and newer, CPU
    rowwise      torch._scaled_mm, scales [P, 1] and [1, Q]                       sm_89, sm_90 and newer, CPU (newer)
    blockwise    torch.nn.functional.scaled_mm, BlockWise1x128, BlockWise128x128  sm_90 with CUDA 12.9

Layouts: a is row-major [P, C], b column-major [C, Q], which is a row-major [Q, C] seen transposed. So
operands whose codes were quantized along the other axis are copied once, as bytes. C and Q must be multiples
of 16. In wgrad, C is the token count, which no user should have to care for: it is padded here with codes of
zero.

Block scales, as cuBLAS reads them (cuBLAS manual, "1D and 2D block scaling for FP8 data types"):

    1x128       [P, C/128] outer-dimension-major, strides (1, P)
    128x128     [ceil4(C/128), Q/128], strides (1, ceil4(C/128)): columns of scales padded to a multiple of 4
"""

from __future__ import annotations

from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.compute.kernels.backend import check_contraction, fake_gemm, not_multiple, plus
from narrowgauge.compute.kernels.both import quantize_both
from narrowgauge.compute.quant import BLOCK_1x128, BLOCK_128x128, Granularity, PerRow, PerTensor, QTensor
from narrowgauge.compute.recipes import Gemm, Recipe
from narrowgauge.errors import RecipeError
from narrowgauge.formats import E4M3FN, E5M2

_TENSORWISE = (PerTensor(), PerTensor())
_ROWWISE = (PerRow(), PerRow())
_BLOCKWISE = ((BLOCK_1x128, BLOCK_128x128), (BLOCK_1x128, BLOCK_1x128))
_EPILOGUE_BIAS = (torch.bfloat16, torch.float16)


class ScaledMM:
    """Runs each gemm with torch's scaled matrix multiply."""

    name = "scaled_mm"
    watches = False

    def supports(self, recipe: Recipe, device: torch.device) -> str | None:
        """Return None when every gemm of `recipe` runs on `device`, else the first reason why not."""
        for name in ("fprop", "dgrad", "wgrad"):
            reason = _unsupported(getattr(recipe, name))
            if reason:
                return f"{name}: {reason}"
        blockwise = any(_kinds(getattr(recipe, name)) in _BLOCKWISE for name in ("fprop", "dgrad", "wgrad"))
        if device.type == "cpu":
            if blockwise:
                return "blockwise gemms exist only on CUDA"
            rowwise = any(_kinds(getattr(recipe, name)) == _ROWWISE for name in ("fprop", "dgrad", "wgrad"))
            if rowwise and not _cpu_takes_rows():
                return f"on a CPU, torch {torch.__version__} multiplies with one scale per tensor only"
            return None
        if device.type != "cuda":
            return f"torch has no FP8 gemm on {device.type!r} devices"
        if torch.version.hip:
            return "AMD GPUs are not supported yet: MI300 multiplies the FNUZ formats, which no recipe uses"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return f"this GPU has compute capability {_dots(capability)}; FP8 tensor cores begin at 8.9"
        if blockwise and (capability != (9, 0) or _cuda_version() < (12, 9)):
            return (
                "blockwise gemms need compute capability 9.0 and CUDA 12.9; "
                f"this is {_dots(capability)} with CUDA {torch.version.cuda}"
            )
        return None

    def refuses(self, recipe: Recipe, n: int, k: int) -> str | None:
        """Return the reason why a weight [n, k] cannot run: 16 for every gemm, 128 for blockwise ones."""
        if _kinds(recipe.fprop) in _BLOCKWISE:
            return not_multiple(n, k, 128, ", which blockwise gemms need")
        return not_multiple(n, k, 16, ", which FP8 gemms need")

    def amax(self, x_MK: Tensor, granularity: Granularity) -> Tensor:
        """Return the largest magnitudes of x's granules."""
        return granularity.amax(x_MK)

    quantize_both = staticmethod(quantize_both)

    def gemm(
        self,
        a: QTensor,
        b: QTensor,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accum: bool = False,
        fake: bool = False,
    ) -> Tensor:
        """Return a [P, C] times b [Q, C] transposed, plus bias [Q], as [P, Q] in `out_dtype`."""
        check_contraction(a, b)
        if fake:
            return fake_gemm(a, b, out_dtype, bias)
        kinds = (a.granularity, b.granularity)
        rows, contracted = a.shape
        if rows == 0 or contracted == 0 or b.shape[0] == 0:
            y_PQ = torch.zeros(rows, b.shape[0], dtype=out_dtype, device=a.codes.device)
        elif kinds in (_TENSORWISE, _ROWWISE):
            return _one_scale(a, b, out_dtype, bias, fast_accum)
        elif kinds in _BLOCKWISE:
            y_PQ = _block_scales(a, b, out_dtype)
        else:
            raise RecipeError(f"scaled_mm cannot multiply {kinds[0]} by {kinds[1]}; use backend='reference'.")
        return y_PQ if bias is None else plus(y_PQ, bias)


def _one_scale(a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """One scale per tensor or per row: the gemm applies it to the accumulator."""
    rowwise = a.scale.dim() > 0
    native = _native_dtype(out_dtype, rowwise=rowwise, device=a.codes.device)
    epilogue = bias.to(native) if bias is not None and native in _EPILOGUE_BIAS else None
    y_PQ: Tensor = torch._scaled_mm(
        _pad(a.codes, 16),
        _pad(b.codes, 16).t(),
        scale_a=_column(a.scale) if rowwise else a.scale,
        scale_b=_column(b.scale).t() if rowwise else b.scale,
        bias=epilogue,
        out_dtype=native,
        use_fast_accum=fast_accum,
    )
    if bias is not None and epilogue is None:
        y_PQ = plus(y_PQ, bias)
    return y_PQ if native == out_dtype else y_PQ.to(out_dtype)


def _column(scale: Tensor) -> Tensor:
    """Scales [P, 1], one beside the other in memory."""
    return scale if scale.stride() == (1, 1) else scale.reshape(-1).unsqueeze(1)


def _block_scales(a: QTensor, b: QTensor, out_dtype: torch.dtype) -> Tensor:
    """Block scales: accumulation is promoted every 128 products. Rows of a are padded to 16 as well."""
    native = out_dtype if out_dtype in (torch.bfloat16, torch.float32) else torch.float32
    rows = a.shape[0]
    square = b.granularity == BLOCK_128x128
    recipes = F.ScalingType
    y_PQ = F.scaled_mm(
        _pad(a.codes, 128, rows=16),
        _pad(b.codes, 128).t(),
        scale_a=_tile_scale(a.scale, rows + -rows % 16),
        scale_recipe_a=recipes.BlockWise1x128,
        scale_b=_square_scale(b.scale) if square else _tile_scale(b.scale, b.shape[0]),
        scale_recipe_b=recipes.BlockWise128x128 if square else recipes.BlockWise1x128,
        output_dtype=native,
    )
    if y_PQ.shape[0] != rows:
        y_PQ = y_PQ[:rows]
    return y_PQ if native == out_dtype else y_PQ.to(out_dtype)


def _square_scale(scale_QC: Tensor) -> Tensor:
    """[Q/128, C/128] to [ceil4(C/128), Q/128] with strides (1, ceil4(C/128))."""
    rows, blocks = scale_QC.shape
    if blocks % 4 == 0 and scale_QC.stride() == (blocks, 1):
        return scale_QC.t()
    padded = scale_QC.new_ones(rows, blocks + -blocks % 4)
    padded[:, :blocks] = scale_QC
    return padded.t()


def _tile_scale(scale_PC: Tensor, rows: int) -> Tensor:
    """[P, C/128] to [rows, C/128] with strides (1, rows); rows beyond P get the scale 1."""
    # Compared by strides, because torch calls a matrix with a side of 1 contiguous whatever they are.
    if scale_PC.shape[0] == rows and scale_PC.stride() == (1, rows):
        return scale_PC
    padded = scale_PC.new_ones(scale_PC.shape[1], rows)
    padded[:, : scale_PC.shape[0]] = scale_PC.t()
    return padded.t()


def _pad(codes: Tensor, contracted: int, rows: int = 1) -> Tensor:
    """Row-major codes, zero codes appended until the last dimension is a multiple of `contracted`."""
    right, below = -codes.shape[1] % contracted, -codes.shape[0] % rows
    if not (right or below) and codes.is_contiguous():
        return codes
    # float8 has few kernels; as bytes, padding and copying are the ordinary ones, and byte 0 is +0 in every
    # format.
    raw = codes.view(torch.uint8)
    if right or below:
        raw = F.pad(raw, (0, right, 0, below))
    return raw.contiguous().view(codes.dtype)


def _native_dtype(out_dtype: torch.dtype, *, rowwise: bool, device: torch.device) -> torch.dtype:
    """The result dtype that the kernel can write; the caller converts the rest."""
    if rowwise and device.type == "cuda":
        wide = out_dtype in (torch.float32, torch.float64) and _rows_to_float32(device)
        return torch.float32 if wide else torch.bfloat16
    return torch.float32 if out_dtype == torch.float64 else out_dtype


@cache
def _rows_to_float32(device: torch.device) -> bool:
    """Whether a product with a scale per row can be written as float32 on this GPU."""
    return torch.cuda.get_device_capability(device) == (9, 0) and _cuda_version() >= (12, 9)


@cache
def _cpu_takes_rows() -> bool:
    """Whether this torch's product on CPUs takes a scale per row; 2.11's does not, 2.13's does. Found by trying."""
    codes, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def _kinds(gemm: Gemm) -> tuple[object, object]:
    return gemm.a.granularity, gemm.b.granularity


def _unsupported(gemm: Gemm) -> str | None:
    """Why no version of torch on an NVIDIA GPU runs this gemm, None if some does."""
    kinds = _kinds(gemm)
    if kinds != _TENSORWISE and kinds != _ROWWISE and kinds not in _BLOCKWISE:
        return f"{gemm.a.granularity} by {gemm.b.granularity} has no native gemm here"
    for operand in chain((gemm.a, gemm.b)):
        if operand.fmt not in (E4M3FN, E5M2):
            return f"{operand.fmt.name} is a format of AMD GPUs"
    if gemm.a.fmt == gemm.b.fmt == E5M2:
        return "E5M2 by E5M2 is not supported by tensor cores; make one operand E4M3FN"
    if kinds != _TENSORWISE and gemm.b.fmt != E4M3FN:
        return f"only tensorwise gemms take {gemm.b.fmt.name} as second operand"
    if kinds in _BLOCKWISE and gemm.a.fmt != E4M3FN:
        return "blockwise gemms take E4M3FN only"
    return None


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
