"""One microbatch, computed again: as it was, to see that it can be, and then in every recipe.

    |loss' - loss| <= 1e-6 |loss|                  ' = replayed without conversion
    |grad' - grad| <= tolerance |grad|             over all parameters; grad is what the real backward added to .grad

Only when both hold are the recipes' numbers worth anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConversionError, let_pass
from narrowgauge.observe.verdict.types import SameWeights
from narrowgauge.session.same_weights.flops import counted
from narrowgauge.session.same_weights.gradient_gap import gap
from narrowgauge.session.same_weights.plan import NotMeasurable, Plan
from narrowgauge.session.same_weights.replay import Gradients, check_inputs, replay, untouched
from narrowgauge.session.same_weights.variant import State, Variant

# A CPU repeats itself to the bit. CUDA kernels that add atomically do not: the backward of attention over 4096
# positions differed by 1.4e-4 to 2.8e-4 from itself (H200, BF16; flash, efficient and cuDNN kernels).
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = {"cpu": 1e-5, "cuda": 5e-3}
# (parameter's name, parameter, its .grad before the backward pass)
Leaf = tuple[str, Tensor, Tensor | None]


class Comparison:
    """Keeps results, notes, FLOPs, and the recipes' scaling states from step to step."""

    def __init__(self, recipes: Mapping[str, Any], variants: Mapping[str, Variant]) -> None:
        self._recipes, self._variants = dict(recipes), dict(variants)
        self.stateful = {n for n, r in recipes.items() if getattr(r, "state", "none") != "none"}
        # recipe -> (first step, last step, one state per model)
        self._states: dict[str, tuple[int, int, list[Mapping[str, State]]]] = {}
        self._keep_hooks: bool | None = None
        self._counted = False
        self.results: list[tuple[str, SameWeights]] = []
        self.notes: list[str] = []
        self.flops: dict[str, Any] | None = None

    def run(self, plan: Plan, recorded: Tensor, leaves: Sequence[Leaf], step: int, *, reported: bool) -> None:
        """Measure one step; one that is not `reported` only fills the scaling states.

        Raises NotMeasurable when the unconverted replay is not what the script computed.
        """
        check_inputs(plan)
        names, params = [leaf[0] for leaf in leaves], [leaf[1] for leaf in leaves]
        produced = [p.grad.detach() if p.grad is not None else None for p in params]
        base: tuple[Tensor, Gradients] | None = None
        with untouched(plan, params):
            if reported or self._keep_hooks is None:
                base = self._baseline(plan, recorded, params)
                self._check_gradients(leaves, base, produced)
                if not all(_finite(base)):
                    self._note(f"Step {step} was not measured: the baseline's own loss or gradients are not finite.")
                    return
            if not self._counted:
                self._count(plan, params)
            del produced
            for name in list(self._variants):
                if reported or name in self.stateful:
                    self._one(name, plan, params, names, base if reported else None, step)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # The baseline, again.

    def _baseline(self, plan: Plan, recorded: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, Gradients]:
        """Without the program's own forward hooks if they only look, else with them."""
        worst = 0.0
        for keep in (False, True) if self._keep_hooks is None else (self._keep_hooks,):
            loss, grads = replay(plan, params, keep_hooks=keep)
            a, b = torch.stack([recorded.reshape(()).double(), loss.reshape(()).double()]).tolist()
            if abs(a - b) <= LOSS_TOLERANCE * abs(a) or (a != a and b != b) or a == b:
                self._keep_hooks = keep
                return loss, grads
            worst = abs(a - b) / abs(a) if a else float("inf")
            del loss, grads
        raise NotMeasurable(
            f"computing the loss again gives another value (relative difference {worst:.3g}); something that the "
            "replay cannot see takes part in it"
        )

    def _check_gradients(
        self, leaves: Sequence[Leaf], base: tuple[Tensor, Gradients], produced: Sequence[Tensor | None]
    ) -> None:
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        rows, eps = [], 0.0
        for (_, p, before), real, again in zip(leaves, produced, base[1], strict=True):
            if real is None:  # not reached, or already used up and freed inside of the backward pass
                continue
            here = real.to_dense() if real.layout is not torch.strided else real
            new = here.float() if before is None else here.float() - _plain(before)
            difference = new if again is None else new - _plain(again)
            kept = new.new_zeros(()) if before is None else _norm(_plain(before))
            rows.append(torch.stack([_norm(new), _norm(difference), kept.double()]).cpu())
            eps = max(eps, torch.finfo(p.dtype).eps)
        if not rows:
            if any(g is not None for g in base[1]):
                self._note("The replayed gradients could not be checked: backward left none in the parameters.")
            return
        sums = torch.stack(rows).square().sum(0).sqrt()
        real_norm, difference, before_norm = sums.tolist()
        tolerance = GRADIENT_TOLERANCE.get(base[0].device.type, GRADIENT_TOLERANCE["cuda"])
        if difference > tolerance * real_norm + 4 * eps * before_norm:
            relative = difference / (real_norm or 1.0)
            raise NotMeasurable(
                f"computing the gradients again gives others (relative difference {relative:.3g}); "
                "something that the replay cannot see takes part in them, such as a hook that changes gradients"
            )

    def _count(self, plan: Plan, params: Sequence[Tensor]) -> None:
        names = {
            id(module): f"{prefix}{inner}" for prefix, root in plan.names() for inner, module in root.named_modules()
        }
        self._counted = True
        try:
            with counted(names) as flops:
                replay(plan, params, keep_hooks=bool(self._keep_hooks))
            self.flops = flops
        except Exception as error:
            let_pass(error)
            self._note(f"FLOPs were not counted ({type(error).__name__}: {error}).")

    # The recipes.

    def _one(
        self,
        name: str,
        plan: Plan,
        params: Sequence[Tensor],
        names: Sequence[str],
        base: tuple[Tensor, Gradients] | None,
        step: int,
    ) -> None:
        variant = self._variants[name]
        try:
            self._put_on(variant, plan)
            if name in self.stateful and not self._continue(name, plan, step, reported=base is not None):
                return
            loss, grads = replay(plan, params, keep_hooks=bool(self._keep_hooks))
            if base is not None:
                self._compare(name, plan, names, base, (loss, grads), step)
            if name in self.stateful:
                first = self._states.get(name, (step, step, []))[0]
                self._states[name] = (first, step, [variant.rolled_state(root) for root in plan.roots])
        except Exception as error:
            let_pass(error)
            self._note(f"{name} was not measured at the same weights: {type(error).__name__}: {error}")
            del self._variants[name]
        finally:
            for root in plan.roots:
                variant.take_off(root)

    def _put_on(self, variant: Variant, plan: Plan) -> None:
        refused = []
        for root in plan.roots:
            try:
                variant.put_on(root)
            except ConversionError as error:  # one of several models may have nothing to convert
                refused.append(error)
        if len(refused) == len(plan.roots):
            raise refused[0]

    def _continue(self, name: str, plan: Plan, step: int, *, reported: bool) -> bool:
        """Load the state that the recipe would have at `step`; False when there is none."""
        first, last, states = self._states.get(name, (step, step - 1, []))
        if (reported and last != step - 1) or (reported and not states):
            self._note(f"{name} was not measured on step {step}: the step before it left no scales.")
            return False
        recipe = self._recipes[name]
        window = recipe.history if recipe.state == "delayed" else (recipe.refresh_every or step + 1)
        if not reported and (first <= step - window or len(states) != len(plan.roots)):
            self._states.pop(name, None)  # too old: training would have forgotten it
            return True
        for root, state in zip(plan.roots, states, strict=False):
            self._variants[name].load_state(root, state)
        return True

    def _compare(
        self,
        name: str,
        plan: Plan,
        names: Sequence[str],
        base: tuple[Tensor, Gradients],
        other: tuple[Tensor, Gradients],
        step: int,
    ) -> None:
        found = gap(names, base[0], other[0], base[1], other[1], plan.loss_scale)
        row = SameWeights(
            step=step,
            loss=found.loss,
            loss_gap_pct=found.loss_gap_pct,
            grad_cosine=found.cosine,
            grad_norm_ratio=found.norm_ratio,
            layers=found.layers,
        )
        self.results.append((name, row))


def _plain(x: Tensor) -> Tensor:
    return (x.to_dense() if x.layout is not torch.strided else x).float()


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _finite(base: tuple[Tensor, Gradients]) -> tuple[bool, ...]:
    flags = [torch.isfinite(base[0]).all().cpu()]
    flags += [torch.isfinite(_norm(_plain(g))).cpu() for g in base[1] if g is not None]
    return tuple(torch.stack(flags).tolist())
