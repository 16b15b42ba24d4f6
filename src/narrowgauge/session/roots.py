"""The models of a program: found, fingerprinted, perturbed or converted once, then followed call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn import ConversionReport, convert, set_observer
from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.recipes import by_name
from narrowgauge.session.fingerprint import weights_hash
from narrowgauge.session.machine import native_fp8
from narrowgauge.session.plan import Plan

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Root:
    """One model: an outermost module that owns trained parameters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self.module = module
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._dtype = dtype
        self._entered: ExitStack | None = None

    def follow(
        self,
        begins: Callable[[Root, tuple[Any, ...], dict[str, Any]], None],
        ended: Callable[[Root, Any], None],
    ) -> None:
        """Have the two called around each call of the model."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            begins(self, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            ended(self, output)

        self.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        self.module.register_forward_hook(after, always_call=True)

    def enter_autocast(self) -> None:
        """Begin the autocast that `--baseline` added, if it did."""
        if self._dtype is not None:
            self._entered = ExitStack()
            self._entered.enter_context(torch.autocast(self.device.type, self._dtype))

    def exit_autocast(self) -> None:
        """End it."""
        if self._entered is not None:
            self._entered.close()
            self._entered = None


class Roots:
    """All models of the program."""

    def __init__(self, plan: Plan, observer: Observer) -> None:
        self._plan, self._observer = plan, observer
        self._roots: dict[int, Root] = {}
        self._reports: list[ConversionReport] = []
        self._hashes: list[str] = []
        self._linear_dtype = ""
        self.notes: list[str] = []

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._roots

    def __len__(self) -> int:
        return len(self._roots)

    def owns_trained(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
        """Whether any of the module's parameters is in an optimizer."""
        own = {id(p) for p in module.parameters()}
        if not own:
            return False
        return any(id(p) in own for opt in optimizers for group in opt.param_groups for p in group["params"])

    def take(self, module: nn.Module) -> Root:
        """Take `module` as a model: fingerprint it, then perturb or convert it as the plan says.

        Raises ConversionError or RecipeError when the plan's conversion is not possible.
        """
        root = Root(module, AUTOCAST.get(self._plan.baseline))
        known = any(id(m) in self._roots for m in module.modules())
        self._roots[id(module)] = root
        if known:  # part of it is already followed and converted
            return root
        self._hashes.append(weights_hash(module.state_dict(keep_vars=True).items()))
        self._watch_dtype(module)
        if self._plan.noise:
            perturb(module, self._plan.noise, self._plan.seed)
        if self._plan.recipe is not None:
            _, report = convert(module, by_name(self._plan.recipe), **self._plan.convert)
            set_observer(module, self._observer)
            self._reports.append(report)
        return root

    def _watch_dtype(self, module: nn.Module) -> None:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        if linear is None:
            return

        def once(_module: nn.Module, _args: Any, output: Any) -> None:
            self._linear_dtype = str(output.dtype).removeprefix("torch.")
            handle.remove()

        handle = linear.register_forward_hook(once)

    def facts(self) -> dict[str, Any]:
        """What is known about the models, for the run's metadata."""
        root = next(iter(self._roots.values()), None)
        rows = [row for report in self._reports for row in report.to_dict()["rows"]]
        # A recipe can be emulated on a GPU whose other recipes are native: what ran decides, not the machine.
        backends = {row["backend"] for row in rows if row["recipe"]}
        return {
            **({"emulated": not native_fp8() or "reference" in backends} if backends else {}),
            "models": len(self._roots),
            "parameters": sum(p.numel() for r in self._roots.values() for p in r.module.parameters()),
            "device": str(root.device) if root else "",
            "baseline_dtype": self._linear_dtype or "no nn.Linear ran",
            "weights_hash": " ".join(self._hashes),
            "conversion": rows,
            "conversion_summary": [
                {k: v for k, v in report.to_dict().items() if k != "rows"} for report in self._reports
            ],
        }


@torch.no_grad()
def perturb(module: nn.Module, relative: float, seed: int) -> None:
    """Multiply every trained weight by 1 + relative * N(0,1), from a generator of its own.

    A 16-bit weight cannot hold so small a change: there, every ten-thousandth element (at least one) moves by one
    unit in the last place instead.
    """
    for number, p in enumerate(module.parameters()):
        if not p.requires_grad or not p.is_floating_point() or p.numel() == 0:
            continue
        generator = torch.Generator("cpu").manual_seed(seed + number)
        if p.dtype in (torch.float32, torch.float64):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            p.mul_(1 + relative * noise.to(p.device, p.dtype))
            continue
        chosen = torch.randint(p.numel(), (max(1, p.numel() // 10_000),), generator=generator).to(p.device)
        flat: Tensor = p.view(-1) if p.is_contiguous() else p.reshape(-1)
        bits = flat[chosen].view(torch.int16) ^ 1
        flat[chosen] = bits.view(p.dtype)
        if not p.is_contiguous():
            p.copy_(flat.view(p.shape))
