"""The variants of a training step: the packaged Llama in one precision, one recipe, or as a peer would convert it.

    step = tokens on the device -> forward -> cross-entropy -> backward -> fused AdamW -> gradients dropped

    fp32, tf32      float32 weights; tf32 lets products round their operands to 10 bits of mantissa
    fp16, bf16      weights, gradients and the optimizer's state in that dtype, no autocast
    a recipe        as bf16, the blocks' linear layers converted, lm_head kept high; so for a peer

Forward and loss are compiled together. Every variant compiles a function of its own, so that no variant's guards are
checked, and none of its compilations counted, in another one's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.bench.own_code import own_code
from narrowgauge.bench.peers import PEERS, apply_peer
from narrowgauge.bench.shapes import KEPT
from narrowgauge.compute.nn import convert
from narrowgauge.compute.recipes import by_name
from narrowgauge.errors import UsageError, nearest
from narrowgauge.scripts import gpt

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MODES = ("compiled", "eager", "cuda-graphs")
LEARNING_RATE = 1e-5  # small: random tokens teach nothing, and every variant should see tensors alike


@dataclass(frozen=True)
class Variant:
    """Which step: the `name` of its row, and one of a precision, a recipe of ours or a peer with its recipe."""

    name: str
    precision: str = "bf16"
    recipe: str | None = None
    peer: str | None = None

    @property
    def wide(self) -> bool:
        """Whether its weights take four bytes each."""
        return PRECISIONS[self.precision].itemsize == 4


def choose_variants(
    precisions: Sequence[str], recipes: Sequence[str], peer: str | None, peer_recipes: Sequence[str] = ()
) -> list[Variant]:
    """BF16 first, because everything is compared with it, then what was asked for, in that order.

    Raises UsageError for an unknown precision and RecipeError for an unknown recipe.
    """
    chosen = [Variant("bf16")]
    for name in precisions:
        if name not in PRECISIONS:
            raise UsageError(f"no precision is called {name!r}; {nearest(name, PRECISIONS)}")
        chosen.append(Variant(name, precision=name))
    chosen += [Variant(by_name(name).name, recipe=name) for name in recipes]
    if peer is not None:
        chosen += [Variant(f"{peer} {name}", recipe=name, peer=peer) for name in peer_recipes or PEERS[peer]]
    return list({variant.name: variant for variant in chosen}.values())


class Stepper:
    """One variant, built: call it for one training step.

    Args:
        variant: which.
        size: the model and its batch.
        device: where.
        mode: "compiled", "eager" or "cuda-graphs".
        like: one of the same variant and mode, whose graph serves this one as well: it is not compiled again.

    Attributes:
        model: the converted model.
        loss: the last step's, a scalar on the device.
        note: what a reader of the row should know, "" if nothing.
        loss_of: of model, tokens [B, T] and targets [B, T] the loss, compiled if the mode says so.
    """

    def __init__(
        self,
        variant: Variant,
        size: gpt.Size,
        device: torch.device,
        mode: str = "compiled",
        like: Stepper | None = None,
    ) -> None:
        self.variant, self.device, self.mode, self.size = variant, device, mode, size
        self.note = ""
        self.loss: Tensor = torch.zeros(())
        torch.manual_seed(0)
        with device:
            model: nn.Module = gpt.Llama(size)
        model = model.to(PRECISIONS[variant.precision])
        if variant.peer is not None and variant.recipe is not None:
            model = apply_peer(model, variant.peer, variant.recipe, KEPT)
        elif variant.recipe is not None:
            model, report = convert(model, recipe=variant.recipe, skip=[KEPT])
            self.note = "; ".join(f"{backend}: {why}" for _, backend, why in report.backends)
        self.model = model
        self.optimizer = gpt.make_optimizer(model, LEARNING_RATE, device)
        if variant.precision == "fp16":  # a second moment below 6e-8 is zero in FP16, and so would be its root
            for group in self.optimizer.param_groups:
                group["eps"] = 1e-4
        self._generator = torch.Generator(device).manual_seed(0)
        self.loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] = (
            _compiled(variant.name, mode)
            if like is None or mode == "cuda-graphs"  # which hold addresses
            else like.loss_of
        )

    def __call__(self) -> None:
        """One training step; returns without waiting for the device."""
        if self.variant.wide:
            torch.set_float32_matmul_precision("high" if self.variant.precision == "tf32" else "highest")
        if self.mode == "cuda-graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.profiler.record_function("narrowgauge.data"):
            tokens, targets = self.batch()
        loss = self.loss_of(self.model, tokens, targets)
        loss.backward()
        with torch.profiler.record_function("narrowgauge.optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        # the next graph of any variant takes the memory of this one's results
        self.loss = loss.detach().clone() if self.mode == "cuda-graphs" else loss.detach()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, each [B, T] int64, made on the device."""
        shape = (2, self.size.batch, self.size.seq)
        drawn = torch.randint(self.size.vocab, shape, device=self.device, generator=self._generator)
        return drawn[0], drawn[1]


def _loss(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens_BT).flatten(0, 1).float(), targets_BT.flatten())


def many_graphs() -> AbstractContextManager[Any]:
    """While this is open, torch.compile keeps more graphs of one function than its usual eight.

    Every variant has a loss function of its own, but where a graph breaks, the parts below it are shared by all.
    """
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=64)
    return patched


def _compiled(name: str, mode: str) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The loss as a function of its own."""
    if mode == "eager":
        return _loss
    compiled: Callable[[nn.Module, Tensor, Tensor], Tensor] = torch.compile(
        own_code(_loss, f"loss of {name}"), mode="reduce-overhead" if mode == "cuda-graphs" else None
    )
    return compiled
