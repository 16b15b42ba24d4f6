"""The fast backend: operands from our own kernels, products from torch's scaled_mm."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.kernels.both import Both, Given
from narrowgauge.compute.kernels.scaled_mm import ScaledMM
from narrowgauge.compute.quant import Granularity
from narrowgauge.compute.recipes import Operand, Recipe


class Fused(ScaledMM):
    """Quantizes for both gemms in one read; multiplies as ScaledMM does."""

    name = "fused"
    watches = True

    def supports(self, recipe: Recipe, device: torch.device) -> str | None:
        """Return None when every gemm of `recipe` runs on `device`, else the first reason why not."""
        if device.type != "cuda":
            return "its kernels are made for CUDA"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return super().supports(recipe, device)

    def amax(self, x_MK: Tensor, granularity: Granularity) -> Tensor:
        """Return the largest magnitudes of x's granules."""
        if elsewhere(x_MK):
            with torch.cuda.device(x_MK.device):
                return _kernels().amax(x_MK, granularity)  # type: ignore[no-any-return]
        return _kernels().amax(x_MK, granularity)  # type: ignore[no-any-return]

    def quantize_both(
        self,
        x_MK: Tensor,
        plain: Operand | None,
        turned: Operand | None,
        *,
        shared: bool,
        given: Given | None = None,
        amax: Tensor | None = None,
        look: Any | None = None,
    ) -> Both:
        """Quantize a tensor for up to two gemms; codes and scales are the reference's."""
        options: dict[str, Any] = {"shared": shared, "given": given, "amax": amax, "look": look}
        if elsewhere(x_MK):
            with torch.cuda.device(x_MK.device):
                return _kernels().quantize_both(x_MK, plain, turned, **options)  # type: ignore[no-any-return]
        return _kernels().quantize_both(x_MK, plain, turned, **options)  # type: ignore[no-any-return]


@cache
def _kernels() -> Any:
    """The module `quantize`: triton is slow to import, and not everywhere."""
    from narrowgauge.compute.kernels.fused import quantize

    return quantize


def elsewhere(x: Tensor) -> bool:
    """Whether x lies on another GPU than the current one, where a kernel would be launched."""
    return x.is_cuda and x.get_device() != torch._C._cuda_getDevice()
