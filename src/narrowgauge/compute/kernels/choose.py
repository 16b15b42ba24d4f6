"""Which backend runs a recipe on a device, and the sentence that says why. Never a silent fallback."""

from __future__ import annotations

from types import MappingProxyType

import torch

from narrowgauge.compute.kernels.backend import Backend
from narrowgauge.compute.kernels.fused.backend import Fused
from narrowgauge.compute.kernels.reference import Reference
from narrowgauge.compute.kernels.scaled_mm import ScaledMM
from narrowgauge.compute.recipes import Recipe
from narrowgauge.errors import RecipeError, nearest

BACKENDS: MappingProxyType[str, Backend] = MappingProxyType(
    {backend.name: backend for backend in (Reference(), ScaledMM(), Fused())}
)


def choose(recipe: Recipe, device: torch.device, requested: str | None = None) -> tuple[Backend, str]:
    """Return the backend and the reason for it.

    A `requested` backend is used or refused with RecipeError, never replaced. Without a request CUDA prefers
    fused, then scaled_mm, and everything else the reference.
    """
    if requested is not None:
        if requested not in BACKENDS:
            raise RecipeError(f"no backend is called {requested!r}; {nearest(requested, BACKENDS)}")
        backend = BACKENDS[requested]
        reason = backend.supports(recipe, device)
        if reason is not None:
            raise RecipeError(
                f"backend {requested!r} cannot run recipe {recipe.name!r} on {device.type!r}: {reason}. "
                "Use backend='reference', which emulates it, or another recipe."
            )
        return backend, "requested"
    reference = BACKENDS["reference"]
    if recipe.fake:
        return reference, "a fake recipe multiplies dequantized operands; there is no FP8 gemm to choose"
    if device.type != "cuda":
        return (
            reference,
            f"emulated: no FP8 tensor cores on {device.type!r}; exact, and faster than torch._scaled_mm here",
        )
    for name in ("fused", "scaled_mm"):
        reason = BACKENDS[name].supports(recipe, device)
        if reason is None:
            return BACKENDS[name], f"native FP8 tensor cores on {torch.cuda.get_device_name(device)}"
    return reference, f"emulated: {reason}"
