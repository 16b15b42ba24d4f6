"""A session in miniature, and a conversion in miniature: what a probe needs around it, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.session.same_weights import SameWeightsProbe


class Rounded(nn.Linear):
    """A linear layer whose weight and input are rounded to E4M3, with straight-through gradients."""

    def forward(self, x: Tensor) -> Tensor:
        def rounded(t: Tensor) -> Tensor:
            return t + (t.detach().float().to(torch.float8_e4m3fn).to(t.dtype) - t.detach())

        return F.linear(rounded(x), rounded(self.weight), self.bias)


@dataclass(frozen=True)
class Recipe:
    """A stand-in for a recipe."""

    state: str = "none"
    history: int = 16
    scale: float = 1.0


class RoundedVariant:
    """Converts by changing classes, as the real one does."""

    def __init__(self, recipe: Any, options: Any) -> None:
        self.recipe = recipe
        self.worn: list[nn.Module] = []

    def put_on(self, module: nn.Module) -> None:
        for m in module.modules():
            if type(m) is nn.Linear:
                m.__class__ = Rounded
                self.worn.append(m)

    def take_off(self, module: nn.Module) -> None:
        for m in self.worn:
            m.__class__ = nn.Linear
        self.worn = []

    def rolled_state(self, module: nn.Module) -> dict[str, Tensor]:
        return {}

    def load_state(self, module: nn.Module, state: Any) -> None: ...


def make_probe(steps: tuple[int, ...] = (2,), **recipes: Any) -> SameWeightsProbe:
    return SameWeightsProbe(recipes or {"rounded": Recipe()}, steps, variant=RoundedVariant)


@contextmanager
def watched(probe: SameWeightsProbe | None, *models: nn.Module) -> Iterator[None]:
    """Tell `probe` what a session would tell it about `models`."""
    if probe is None:
        yield
        return
    depth = 0

    def busy() -> bool:
        return torch._C._current_graph_task_id() != -1

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal depth
        if busy():
            return
        depth += 1
        if depth == 1 and torch.is_grad_enabled():
            probe.module_call_begin(module, args, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        if busy():
            return
        depth -= 1
        if depth == 0 and torch.is_grad_enabled():
            probe.module_call_end(module, output)

    # As if they came from the package: a replay takes those off.
    before.__module__ = after.__module__ = "narrowgauge.session.models.roots"
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if busy():
            return original(tensors, *args, **kwargs)
        probe.before_backward(tensors, not any(a is not None and a is not False for a in (*args, *kwargs.values())))
        original(tensors, *args, **kwargs)
        probe.after_backward(tensors)

    handles = []
    for model in models:
        handles.append(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(model.register_forward_hook(after, always_call=True))
    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
        for handle in handles:
            handle.remove()
