"""The operands of a layer's three products, quantized by a backend as its recipe says.

    input        x_MK     plain for fprop, turned for wgrad
    weight       w_NK     plain for fprop, turned for dgrad
    grad_output  dy_MN    plain for dgrad, turned for wgrad

A recipe with state quantizes by a given scale, whose making is not timed; its amax goes into a slot in the same pass.

Legend: M = tokens, N = output features, K = input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.compute.kernels import BACKENDS, Backend, Given
from narrowgauge.compute.quant import PerRow, PerTensor, QTensor
from narrowgauge.compute.recipes import ROLES, Recipe
from narrowgauge.compute.recipes.recipe import Role

GEMMS = ("fprop", "dgrad", "wgrad")
# gemm -> (role of a, whether it is a's turned copy), the same of b
USES: dict[str, tuple[tuple[Role, bool], tuple[Role, bool]]] = {
    "fprop": (("input", False), ("weight", False)),
    "dgrad": (("grad_output", False), ("weight", True)),
    "wgrad": (("grad_output", True), ("input", True)),
}


@dataclass(frozen=True)
class Tensors:
    """The three tensors of a layer's step: x_MK, w_NK, dy_MN."""

    input: Tensor
    weight: Tensor
    grad_output: Tensor

    @classmethod
    def random(cls, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensors:
        """Normal numbers; weights and gradients smaller, as they are in training."""
        return cls(
            torch.randn(M, K, device=device, dtype=dtype),
            torch.randn(N, K, device=device, dtype=dtype).mul_(0.02),
            torch.randn(M, N, device=device, dtype=dtype).mul_(1e-4),
        )

    def product(self, gemm: str) -> Callable[[], Tensor]:
        """The product in high precision: y_MN, dx_MK or dw_NK."""
        x, w, dy = self.input, self.weight, self.grad_output
        a, b = {"fprop": (x, w.T), "dgrad": (dy, w), "wgrad": (dy.T, x)}[gemm]
        return lambda: torch.mm(a, b)


def native(recipe: Recipe, device: torch.device) -> Backend | None:
    """The fastest backend that runs the recipe on FP8 hardware, None where there is none."""
    for name in ("fused", "scaled_mm"):
        if device.type == "cuda" and BACKENDS[name].supports(recipe, device) is None:
            return BACKENDS[name]
    return None


def quantizer(
    recipe: Recipe, role: Role, x: Tensor, backend: Backend, turned: bool = True
) -> Callable[[], tuple[QTensor | None, QTensor | None]]:
    """A call that quantizes x as the layer does: plain, and if `turned` for the other product as well."""
    plain_rule, turned_rule = recipe.uses(role)
    shared = recipe.shares(role)
    given = None
    if recipe.state != "none":
        amax = backend.amax(x, plain_rule.granularity).reshape(())
        once = backend.quantize_both(x, plain_rule, None, shared=shared, amax=amax)
        assert once[0] is not None
        scale = once[0].scale.reshape(()).clone()
        slot = torch.full((1,), -1.0, device=x.device) if recipe.state == "delayed" else None
        given = Given(scale, scale.reciprocal(), slot)

    def call() -> tuple[QTensor | None, QTensor | None]:
        both = backend.quantize_both(x, plain_rule, turned_rule if turned else None, shared=shared, given=given)
        return both[0], both[1]

    return call


def gemm_call(
    recipe: Recipe, gemm: str, tensors: Tensors, backend: Backend, fast: bool | None = None
) -> Callable[[], Tensor]:
    """A call of one product with operands quantized beforehand; `fast` overrides the recipe's accumulation."""
    made = {
        role: quantizer(recipe, role, getattr(tensors, role), backend)() for role in ROLES if role in dict(USES[gemm])
    }
    a, b = (made[role][turned] for role, turned in USES[gemm])
    assert a is not None  # both copies were asked for
    assert b is not None
    fast_accum = getattr(recipe, gemm).fast_accum if fast is None else fast
    return lambda: backend.gemm(a, b, torch.bfloat16, fast_accum=fast_accum)


def reads(recipe: Recipe, role: Role) -> int:
    """How often x must be read: twice where a scale depends on all of it, or on whole columns, and is not given."""
    if recipe.state != "none":
        return 1
    return 2 if any(isinstance(rule.granularity, PerTensor | PerRow) for rule in recipe.uses(role)) else 1


def written_bytes(*made: QTensor | None) -> int:
    """Bytes of codes and scales, a buffer that two copies share counted once."""
    return bytes_of(*(t for q in made if q is not None for t in (q.codes, q.scale)))


def bytes_of(*tensors: Tensor) -> int:
    """Bytes of the tensors, a buffer that two share counted once."""
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())
