"""The noise-free measure: what FP8 does to the loss and the gradient at the same weights, batch and random state.

    step s - 1   tape, real backward, replay in each recipe that keeps state     only fills its scales
    step s       tape, real backward, replay unconverted                        must give the recorded loss and gradient
                                      replay in each recipe, one at a time      -> one SameWeights each

Two training runs drift apart by themselves; here nothing drifts, because both sides start from the same bits. A replay
that does not reproduce what the script itself computed is not used: the reason is noted, and there is no number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import let_pass
from narrowgauge.observe.verdict.types import SameWeights
from narrowgauge.session.same_weights.comparison import Comparison
from narrowgauge.session.same_weights.plan import NotMeasurable, Plan
from narrowgauge.session.same_weights.tape import Tape
from narrowgauge.session.same_weights.variant import RecipeVariant, Variant


class SameWeightsProbe:
    """Measures each of `recipes` on each of `steps`; tell it what the program does and read `results`.

    `armed(step)` must be called when a step begins. Nothing here raises: a failure becomes one of `notes`.
    `seconds` is what all of it cost.
    """

    def __init__(
        self,
        recipes: Mapping[str, Any],
        steps: Sequence[int],
        convert_options: Mapping[str, Any] | None = None,
        variant: Callable[[Any, Mapping[str, Any]], Variant] = RecipeVariant,
    ) -> None:
        options = dict(convert_options or {})
        self._comparison = Comparison(recipes, {n: variant(r, options) for n, r in recipes.items()})
        self._steps = frozenset(steps)
        before = {s - 1 for s in steps} - self._steps
        self._warm = frozenset(before) if self._comparison.stateful else frozenset()
        self._tape: Tape | None = None
        self._plan: Plan | None = None
        self._loss: Tensor | None = None
        self._leaves: dict[str, Tensor] = {}
        self._grads_before: list[Tensor | None] = []
        self._step = -1
        self._over = False  # this step's microbatch has been taken
        self._busy = False
        self._constants: tuple[float, ...] | None = None
        self._disabled = False
        self._notes: list[str] = []
        self.seconds = 0.0

    @property
    def results(self) -> list[tuple[str, SameWeights]]:
        """(recipe's name, what was measured), in the order of measuring."""
        return self._comparison.results

    @property
    def notes(self) -> list[str]:
        """What could not be measured and why, and what to know about what was."""
        return [*self._notes, *self._comparison.notes]

    @property
    def flops(self) -> dict[str, Any] | None:
        """FLOPs of one microbatch: total, by operator, per linear layer; None until measured."""
        return self._comparison.flops

    def armed(self, step: int) -> bool:
        """Whether `step` is one to be measured and its first microbatch is not over; also tells which step it is."""
        if step != self._step:
            self._abandon()
            self._step, self._over = step, False
        return not (self._disabled or self._over) and (step in self._steps or step in self._warm)

    def module_call_begin(self, module: nn.Module, args: Any, kwargs: Any, whole: nn.Module | None = None) -> None:
        """An outermost call of a model begins, or of a part of the model `whole`."""
        self._guarded(lambda: self._begin(module, args, kwargs, whole))

    def module_call_end(self, module: nn.Module, output: Any) -> None:
        """It returned `output`."""
        self._guarded(lambda: self._tape.module_ends(module, output) if self._tape is not None else None)

    def before_backward(self, loss: Any, plain: bool = True) -> None:
        """`torch.autograd.backward(loss)` is about to run; `plain` when it was given nothing but tensors."""
        self._guarded(lambda: self._before_backward(loss, plain))

    def after_backward(self, loss: Any) -> None:
        """It returned; the weights have not moved."""
        self._guarded(self._after_backward)

    def _guarded(self, work: Callable[[], Any]) -> None:
        # In a backward pass recomputed forwards call modules; while a replay runs, everything here is its own doing.
        if self._disabled or self._over or self._busy or self._step not in self._steps | self._warm:
            return
        began = time.perf_counter()
        try:
            with torch._C._EnableTorchFunction():  # what it records and replays is the program's own
                work()
        except NotMeasurable as reason:
            self._give_up(str(reason))
        except torch.OutOfMemoryError:
            self._give_up("there was not enough memory for a second pass")
        except Exception as error:
            self._give_up(f"measuring failed ({type(error).__name__}: {str(error).splitlines()[:1]})")
            let_pass(error)
        finally:
            self.seconds += time.perf_counter() - began

    def _give_up(self, why: str) -> None:
        self._note(f"No comparison at the same weights from step {self._step} on: {why}.")
        self._disabled = True
        self._abandon()

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _abandon(self) -> None:
        if self._tape is not None:
            self._tape.stop()
            if not self._disabled and self._plan is None and not self._over:
                self._note(f"Step {self._step} was not measured: its loss was never given to backward.")
        self._tape = self._plan = self._loss = None
        self._leaves, self._grads_before = {}, []

    def hand_over(self) -> None:
        """Another thread goes on: what the last one began is none of the step, which is measured as this one makes it.

        Its mode stays in that thread, where alone it can be taken off, and does nothing.
        """
        if self._tape is not None and not self._busy:
            self._tape.stop()
            self._tape = self._plan = self._loss = None
            self._leaves, self._grads_before = {}, []

    # One microbatch.

    def _begin(self, module: nn.Module, args: Any, kwargs: Any, whole: nn.Module | None) -> None:
        if self._plan is not None or (self._tape is None and not torch.is_grad_enabled()):
            return
        if self._tape is None:
            self._tape = Tape()
            self._tape.start()
        self._tape.module_begins(module, args, kwargs, whole)

    def _before_backward(self, loss: Any, plain: bool) -> None:
        if self._tape is None or self._plan is not None:
            return
        tape = self._tape
        tape.stop()
        if isinstance(loss, tuple | list) and len(loss) == 1:
            loss = loss[0]
        if not isinstance(loss, Tensor):
            raise NotMeasurable("backward was called on several tensors at once")
        if not plain:
            raise NotMeasurable("backward was called with gradients, inputs, retain_graph or create_graph")
        if loss.numel() != 1:
            raise NotMeasurable(f"backward was called on a tensor of shape {tuple(loss.shape)}, not on a scalar loss")
        self._plan = tape.close(loss)
        self._loss = loss.detach()
        self._leaves = _trained(self._plan)
        if not self._leaves:
            raise NotMeasurable("no parameter of the model that was called is being trained")
        self._grads_before = [None if p.grad is None else p.grad.detach().clone() for p in self._leaves.values()]

    def _after_backward(self) -> None:
        plan, self._over = self._plan, True
        if plan is None or self._loss is None:
            return
        self._busy = True
        try:
            produced = list(zip(self._leaves, self._leaves.values(), self._grads_before, strict=True))
            self._grads_before = []
            self._check_constants(plan)
            self._comparison.run(plan, self._loss, produced, self._step, reported=self._step in self._steps)
        finally:
            self._busy = False
            self._tape = self._plan = self._loss = None
            self._leaves, self._grads_before = {}, []

    def _check_constants(self, plan: Plan) -> None:
        """Numbers that the script read from the model's output and put back into the loss are not computed again."""
        last, self._constants = self._constants, plan.constants
        by_hand = plan.host_reads & {"tolist", "numpy", "__array__"}
        if by_hand or (plan.host_reads and last is not None and last != plan.constants):
            how = ", ".join(sorted(plan.host_reads))
            self._note(
                f"The script reads values of the model's output on the host ({how}) before its loss is complete; where "
                "the loss depends on them, they are the baseline's in every comparison at the same weights."
            )


def _trained(plan: Plan) -> dict[str, Tensor]:
    """The parameters that get gradients, by name; with several models, by `ClassName.name`."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, root in plan.names():
        for inner, p in root.named_parameters():
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                found[f"{name}{inner}"] = p
    for leaf in plan.externals():  # weights that the script itself uses, beside its models
        if isinstance(leaf.tensor, nn.Parameter) and leaf.tensor.requires_grad and id(leaf.tensor) not in seen:
            seen.add(id(leaf.tensor))
            found[f"(parameter {len(found)})"] = leaf.tensor
    return found
