"""A session: everything that happens to one training program from its first optimizer to its last step.

    optimizer made -> the model's first call with gradients -> hash, perturb or convert it -> step after step
                                                                    forward  data hash, tokens
                                                                    backward loss, probe at the same weights
                                                                    step     gradient norm, learning rate, time

*The model* is what owns parameters in an optimizer: a teacher or an averaged copy is left alone. A step is opened by
the first forward (or backward) after an optimizer step. Nothing here may raise into the program, but for two things
that must end it: the step limit, and a conversion that the user asked for and that cannot be done.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.session import status
from narrowgauge.session.batches import Batches
from narrowgauge.session.compiled_calls import CompiledCalls
from narrowgauge.session.family import Family
from narrowgauge.session.fingerprint import stored
from narrowgauge.session.ledger import Ledger
from narrowgauge.session.losses import EvalLosses
from narrowgauge.session.memory import PeakMemory
from narrowgauge.session.plain_sites import PlainSites
from narrowgauge.session.plan import Plan
from narrowgauge.session.root import Root
from narrowgauge.session.roots import Roots
from narrowgauge.session.same_weights import SameWeightsProbe
from narrowgauge.session.seams import Seams, in_backward


class StopTraining(SystemExit):
    """Ends the program cleanly once it has made the steps that were asked for."""


class Session:
    """Follows one program, as `plan` says; `facts()` is what it learned."""

    def __init__(
        self,
        plan: Plan,
        writer: RunWriter,
        probe: SameWeightsProbe | None = None,
        family: Family | None = None,
        compiled: CompiledCalls | None = None,
    ) -> None:
        self._plan, self._writer, self._probe = plan, writer, probe
        self.collector = Collector(writer, every=plan.every)
        self.ledger = Ledger(writer)
        self.memory = PeakMemory()
        self._training = False  # a forward with gradients is running
        self.plain = PlainSites(plan.judge, eager=plan.recipe is None, training=lambda: self._training)
        self.roots = Roots(plan, self.collector, self.plain, family)
        self.notes: list[str] = []
        self.skipped_steps = 0
        self.backwards = 0
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self.optimizers_made = 0
        self._evals = EvalLosses()
        self._depth = 0
        self._compiled: dict[int, Root] = {}  # by the id of what was compiled, which its caller keeps alive
        self._stepped = True  # the next forward opens a step
        self._batches = Batches()
        self._clip_norm: Tensor | None = None
        self._scaled: tuple[Tensor, Tensor, Any] | None = None
        self._eval_began = 0.0
        self.seams = Seams(self, compiling=plan.compiling)
        self._calls = (compiled or CompiledCalls()) if plan.compiling else None
        if self._calls is not None:
            self._calls.listener = self
        self._evals.watch(self.seams)

    # What the program does, in the order in which it does it.

    def module_registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """A module got a submodule."""
        self.roots.family.registered(parent, child)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Its parameters are the ones being trained."""
        self.optimizers.add(optimizer)
        self.optimizers_made += 1

    def module_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called; the first outermost one with trained parameters is taken as the model."""
        if self._depth or module in self.roots or not self.optimizers:
            return
        if in_backward() or not torch.is_grad_enabled() or not self.roots.owns_trained(module, self.optimizers):
            return
        root = self.roots.take(module, self.optimizers)
        self._writer.update_meta(**self.roots.facts())  # known from now on, should the run be killed
        root.follow(self.root_begins, self.root_ended)
        self.root_begins(root, args, {})  # its own hook is there from the next call on

    def root_begins(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called."""
        if in_backward():
            return
        self._depth += 1
        if self._depth > 1:
            return
        if not torch.is_grad_enabled():
            self._eval_began = time.perf_counter()
            self._evals.model_begins()
            return
        if self._stepped or self.ledger.line is None:
            self._open_step()
        self._training = True
        root.enter_autocast()
        tokens = self._batches.see((args, kwargs))
        if self.ledger.line is not None:
            self.ledger.line.tokens += tokens
        if self._probe is not None:
            self._probe.module_call_begin(root.module, args, kwargs, root.model)

    def root_ended(self, root: Root, output: Any) -> None:
        """The model's call returned (or raised: then `output` is None)."""
        if in_backward() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        self._training = False
        self._batches.made(output)
        if not torch.is_grad_enabled():
            self._evals.model_ended(output)
            if self.ledger.line is not None:
                self.ledger.line.away += time.perf_counter() - self._eval_began
                self.ledger.line.disturbed = True
            return
        root.exit_autocast()
        if self._probe is not None:
            self._probe.module_call_end(root.module, output)

    def loss_scaled(self, scaler: Any, before: Any, after: Any) -> None:
        """A gradient scaler multiplied the loss."""
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            self._scaled = (after, before, scaler)

    def backward_begins(self, loss: Any, plain: bool) -> None:
        """`backward` is called on `loss`."""
        self.backwards += 1
        if self._stepped or self.ledger.line is None:
            self._open_step()
        seen = loss[0] if isinstance(loss, tuple | list) and len(loss) == 1 else loss
        if self._scaled is not None and self._scaled[0] is seen and self.ledger.line is not None:
            scale = getattr(self._scaled[2], "_scale", None)
            if isinstance(scale, Tensor):
                self.ledger.line.scalars["loss_scale"] = scale.detach().clone()
            seen = self._scaled[1]
        if isinstance(seen, Tensor) and seen.numel() == 1:
            self.ledger.add_loss(seen)
        if self._probe is not None:
            self._probe.before_backward(loss, plain)

    def backward_ended(self, loss: Any) -> None:
        """The gradients of one microbatch are there; the weights have not moved."""
        self._scaled = None
        line = self.ledger.line
        if self._probe is None or line is None or not self._probe.armed(line.step):
            return
        began = time.perf_counter()
        self.memory.sample()
        self._probe.after_backward(loss)
        self.memory.forget()
        line.away += time.perf_counter() - began
        line.disturbed = True

    def gradients_clipped(self, norm: Tensor) -> None:
        """The program clipped; its own norm is the one before clipping."""
        self._clip_norm = norm.detach() if isinstance(norm, Tensor) else None

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        line = self.ledger.line
        if line is None or in_backward():
            return
        if "lr" not in line.scalars and optimizer.param_groups:
            lr = optimizer.param_groups[0].get("lr")
            if lr is not None:
                line.scalars["lr"] = lr.detach() if isinstance(lr, Tensor) else float(lr)
        if "grad_norm" not in line.scalars:
            norm = self._clip_norm if self._clip_norm is not None else _grad_norm(optimizer)
            if norm is not None:
                line.scalars["grad_norm"] = norm

    def step_ended(self, optimizer: Optimizer) -> None:
        """An optimizer stepped."""
        self._clip_norm = None
        self.plain.end()
        self.ledger.stepped()
        self._stepped = True

    def scaler_stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        """A gradient scaler's step returned; if the optimizer did not move, it skipped."""
        if self._stepped or self.ledger.line is None:
            return
        self.ledger.line.scalars["skipped"] = 1.0
        self.skipped_steps += 1
        self.step_ended(optimizer)

    def compile_refused(self) -> None:
        """The program asked for torch.compile."""
        note = "The script calls torch.compile; every run here was eager."
        if note not in self.notes:
            self.notes.append(note)

    def compiled_begins(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Root | None:
        """A compiled function, or a module compiled in place, is called: as a model, unless one is being called.

        Inside of it nobody is told of calls. So a function that is called before any model was is taken for the call
        of the whole that the optimizers train.
        """
        if self._depth or not self.optimizers or in_backward():
            return None
        root = self._compiled.get(id(owner))
        if root is None:
            root = self._take_compiled(owner)
            if root is None:
                return None
            self._compiled[id(owner)] = root
        self.root_begins(root, args, kwargs)
        return root

    def compiled_ended(self, known: Root | None, output: Any) -> None:
        """Its call returned."""
        if known is not None:
            self.root_ended(known, output)

    def _take_compiled(self, owner: Any) -> Root | None:
        if not torch.is_grad_enabled():
            return None
        if isinstance(owner, nn.Module):
            module = owner if self.roots.owns_trained(owner, self.optimizers) else None
        else:
            module = self.roots.whole(self.optimizers) if not len(self.roots) else None
        if module is None or module in self.roots:
            return None
        root = self.roots.take(module, self.optimizers)
        self._writer.update_meta(**self.roots.facts())
        return root

    # What the session does about it.

    def _open_step(self) -> None:
        self._close_step()
        if self._plan.steps is not None and self.ledger.steps >= self._plan.steps:
            self._depth = 0
            raise StopTraining
        self._stepped = False
        line = self.ledger.open()
        line.disturbed = self.collector.begin_step(line.step)
        if line.disturbed:
            self.plain.begin()
        if self._probe is not None:
            line.disturbed |= self._probe.armed(line.step)
        self._report()

    def _close_step(self) -> None:
        self._take_evaluation()
        self.memory.sample()
        line = self.ledger.line
        digest = self._batches.digest
        if line is not None and digest is not None:
            line.scalars["data_digest"] = stored(digest)
        self.collector.end_step()

    def _take_evaluation(self) -> None:
        loss = self._evals.take()
        if loss is None:
            return
        if self.ledger.line is not None:
            self.ledger.line.scalars["eval_loss"] = loss
        else:
            self._writer.add_scalars(0, eval_loss=float(loss))

    def finish(self) -> None:
        """The program ended: close the last step and write everything."""
        self._close_step()
        self.ledger.finish()
        self.collector.flush()
        self.abandon()
        self._report(done=True)

    def abandon(self) -> None:
        """Hear nothing of the program any more, and leave no hook in it: it ended, or this is a forked child."""
        self.seams.close()
        if self._calls is not None:
            self._calls.close()
        self.plain.end()
        self.roots.leave()

    def _report(self, *, done: bool = False) -> None:
        if self._writer.rank == 0:  # one pulse is enough for a progress display
            status.report(self._plan, self.ledger, done=done)

    def facts(self) -> dict[str, Any]:
        """What the run's metadata says of how it went."""
        probe = self._probe
        return {
            **self.roots.facts(),
            "steps": self.ledger.steps,
            "nan_steps": self.ledger.nonfinite_steps,
            "skipped_steps": self.skipped_steps,
            "optimizers": self.optimizers_made,
            "backwards": self.backwards,
            "peak_memory_bytes": self.memory.bytes(),
            "watch": {"every": self._plan.every, "seconds": self.collector.seconds},
            "notes": [*self.notes, *self.roots.notes, *self._batches.notes, *self.plain.notes],
            "same_weights": [] if probe is None else [{"recipe": name, **asdict(row)} for name, row in probe.results],
            "same_weights_notes": [] if probe is None else list(probe.notes),
            "refusal": self.roots.refusal,
            "flops": None if probe is None else probe.flops,
        }


def _grad_norm(optimizer: Optimizer) -> Tensor | None:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    dense = [g.detach() for g in grads if g.layout is torch.strided]
    if not dense:
        return None
    norms = torch._foreach_norm(dense)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float32) for n in norms]))
    return norm
