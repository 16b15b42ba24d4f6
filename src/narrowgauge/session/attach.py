"""A session: everything that happens to one training program from its first optimizer to its last step.

    optimizer made -> the model's first call with gradients -> hash, perturb or convert it -> step after step
                                                                    forward  data hash, tokens         calls.py
                                                                    backward loss, probe               updates.py
                                                                    step     norms, rate, time         steps.py

*The model* is what owns parameters in an optimizer: a teacher or an averaged copy is left alone. Nothing here may
raise into the program, but for two things that must end it: the step limit, and a conversion that the user asked for
and that cannot be done.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks

from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.nn.tracing.optimizer_steps import OURS
from narrowgauge.observe.stats import host
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.doors import (
    calling,
    cuda_graphs,
    deepspeed,
    fsdp,
    groups,
    making,
    pipelining,
    swapping,
    updating,
)
from narrowgauge.session.doors.compilations import must_compile
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.leaving import leave_models_clean
from narrowgauge.session.doors.megatron import Megatron
from narrowgauge.session.doors.recorded_graphs import compiling_seconds
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.models.calls import Calls
from narrowgauge.session.models.compiled_models import CompiledModels
from narrowgauge.session.models.family import Family
from narrowgauge.session.models.handing import Handing
from narrowgauge.session.models.inner_calls import InnerCalls
from narrowgauge.session.models.meeting import Meeting
from narrowgauge.session.models.roots import Roots
from narrowgauge.session.not_found import not_found
from narrowgauge.session.plan import Plan
from narrowgauge.session.ranks import Ranks, Told
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.same_weights import SameWeightsProbe
from narrowgauge.session.selection.too_few import too_few
from narrowgauge.session.shortcut import Shortcut
from narrowgauge.session.sites.choice import Choice
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.sites.said import CLOSED
from narrowgauge.session.steps.graphed import Graphed
from narrowgauge.session.steps.graphs import Graphs
from narrowgauge.session.steps.ledger import Ledger
from narrowgauge.session.steps.loading import Loading
from narrowgauge.session.steps.others import Others
from narrowgauge.session.steps.rest import REFERS
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps, StopTraining
from narrowgauge.session.steps.trained import Trained, only_estimates
from narrowgauge.session.steps.updates import Updates

__all__ = ["Session", "StopTraining"]

_log = logging.getLogger("narrowgauge.session")


class Session:
    """Follows one program, as `plan` says; `facts()` is what it learned.

    Args:
        plan, writer: what to do, and where to.
        probe: what compares recipes at the same weights, in a comparison.
        family, compiled: what was heard before there was a session.
        only: the model to follow; without one, all that train.
    """

    def __init__(
        self,
        plan: Plan,
        writer: RunWriter,
        probe: SameWeightsProbe | None = None,
        family: Family | None = None,
        compiled: CompiledCalls | None = None,
        only: nn.Module | None = None,
    ) -> None:
        self.plan, self._writer, self._probe = plan, writer, probe
        self.notes: list[str] = []
        self.optimizers = Trained()
        self.optimizers_made = 0
        self._estimates = False  # an optimizer was made on the meta device
        self.others = Others(only, self.optimizers, lambda: self.ledger.steps)
        self.forks = 0  # children, in which nobody listens
        self.recorder = Recorder(plan, writer)
        self.recorder.mine = lambda: self.calls.of_training()
        self._compiled = (compiled or CompiledCalls()) if plan.compiling else None
        self._inner: InnerCalls | None = None
        self._troubled = False
        self.hearing = Hearing(self._trouble)
        self.plain = PlainSites(
            plan.judge,
            eager=plan.recipe is None,
            training=lambda: self.calls.training,
            mine=lambda: self.calls.of_training(),
            compilations=self._compiled,
            choice=Choice(
                plan.watch.get("compiled", "auto"),
                lambda: self.ledger.rows.lost(),
                compiling_seconds,
                lambda: self.ranks.dear if Ranks.world() > 1 else None,
            ),
            unheard=self.hearing.nothing,
            told=self._trouble,
        )
        self.roots = Roots(plan, self.recorder, self.plain, family)
        told = Told(
            *(self._copies, self._mesh, self.roots.stage),
            *(lambda: self.roots.taken, self.optimizers.mesh),
            *(lambda: self.roots.began(self.optimizers.parameters()), self.plain.choice.dear),
            lambda: self.steps.rest.able and self.ledger.rows.pace.short,
        )
        further = None if self.recorder.what_if is None else self.recorder.what_if.collectors
        self.ranks = Ranks(plan, writer, self.recorder.collector, told, further)
        self.steps = Steps(plan, writer, self.recorder, self.plain, self.ranks, probe)
        self.ranks.held_by(self.ledger.rows.tell)
        self.ledger.rows.pace.parameters = lambda: len(self.optimizers.made())
        same = SameTraining(self.hearing, self.steps, self.optimizers, self.roots.called_in)
        self.loading = Loading(self.hearing, self.steps.evals, self.ledger.aside)
        self.calls = Calls(
            *(self.roots, self.steps, probe, self.hearing, same, self.loading),
            *(self.optimizers, self._model_taken, self._deaf),
        )
        self.updates = Updates(
            *(self.steps, probe, self.hearing, same),
            *(self._follows, self.optimizers.in_parts, self.optimizers.parameters),
            *(self.others.learn_from, self.others.hold),
        )
        self.hearing.handing = Handing(self.calls, self.steps, self.updates)
        graphed = Graphed(self.steps, self.hearing, self.roots.unhooked)
        self.graphs = Graphs(self.steps, self.updates, self.hearing, graphed)
        self.seams = Seams()
        making.follow(self.seams, self, compiling=plan.compiling)
        updating.follow(self.seams, self.updates, self.graphs)
        self.meeting = Meeting(*(self.calls, self.roots, self.steps, self.hearing, same, self.optimizers))
        self._hear_modules = calling.follow(self.seams, self.meeting, self.calls, self.loading)
        Shortcut(self.seams, self.hearing, self.steps, self.calls.alone, self.updates, self.roots, self.optimizers)
        leave_models_clean(self.seams, self.roots.family.known if plan.recipe else None)
        cuda_graphs.follow(self.seams, self.graphs)
        swapping.follow(self.seams)
        groups.follow(self.seams, self._part, self.ranks.old_store.wait)
        self.seams.replace_where_held()
        megatron = Megatron()
        self._doors: list[Callable[[Seams, Updates], bool]] = [  # still to open
            *(deepspeed.follow, fsdp.follow, megatron.follow_schedules, megatron.follow_optimizers, pipelining.follow),
            lambda seams, _: cuda_graphs.follow_transformer_engine(seams, self.graphs),
        ]
        self._open_doors()
        if self._compiled is not None:
            listener = CompiledModels(*(self.calls, self.roots, self.steps, self.hearing, same, self.optimizers))
            self._compiled.listener, self._inner = listener, listener.inner
            self._compiled.graphs = self.plain.compiled
            self._compiled.told()
        self.steps.evals.watch(self.seams, self.hearing.perhaps_mine)
        self.steps.resting.told, self.steps.rest.refused = self._rest, self._never_rests
        self.steps.rest.cycle.held = lambda: self.optimizers

    @property
    def ledger(self) -> Ledger:
        """The steps' lines."""
        return self.steps.ledger

    def module_registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """A module got a submodule."""
        self.roots.registered(parent, child)
        if len(sys.modules) != self._loaded:  # asked for every module, and for every cut of a list of them
            self._open_doors()

    def _open_doors(self) -> None:
        """A library may be loaded late: an engine's not before it holds the model, an optimizer's as it makes one."""
        self._loaded = len(sys.modules)
        if self._doors:
            self._doors = [follow for follow in self._doors if not follow(self.seams, self.updates)]

    def optimizer_made(self, optimizer: Optimizer, made_with: Sequence[Tensor] | None = None) -> None:
        """Its parameters are the ones being trained; it was `made_with` these if it has others by now."""
        try:
            unseen_by_modes(self._made, optimizer, made_with)
        except Exception as error:
            self.hearing.failed("optimizer_made", error)

    def _made(self, optimizer: Optimizer, made_with: Sequence[Tensor] | None) -> None:
        self._open_doors()
        self.calls.recover()
        made_with = [p for group in optimizer.param_groups for p in group["params"]] if made_with is None else made_with
        if self.others.made(made_with):
            self.updates.alone.others = True
            return
        self.optimizers.add(optimizer, made_with)
        self.optimizers_made += 1
        self.steps.resting.wake()
        self._estimates |= only_estimates(optimizer)
        self.plain.weights_came()
        self.steps.evals.training_changed()
        self.ledger.ready()

    def optimizer_restored(self, optimizer: Optimizer) -> None:
        """It is a copy, was unpickled, or only loads a state."""
        if optimizer not in self.optimizers:
            self.optimizer_made(optimizer)
        self.optimizer_grown(optimizer)

    def optimizer_grown(self, optimizer: Optimizer) -> None:
        """It may hold other parameters than before; one that is just being made is not known yet."""
        if optimizer in self.optimizers:
            self.optimizers.changed()
            self.steps.resting.wake()
            self.plain.weights_came()
            self.steps.evals.training_changed()

    def compile_refused(self, function: Any) -> None:
        """The program asked for torch.compile, or torch did for itself."""
        note = "The script calls torch.compile; every run here was eager."
        if must_compile(function):
            operator = function.__module__.rpartition(".")[2]
            note = (
                f"The script calls torch's operator {operator!r}, which takes functions, and which torch compiles to "
                "find the weights that these read; every run here was eager, where such weights get no gradients. "
                "To compare, write it as plain Python, or give it the weights as operands."
            )
        if note not in self.notes:
            self.notes.append(note)

    def _deaf(self, deaf: bool) -> None:
        """Modules' calls are not heard for a while; unless something is compiled, which asks what hooks there are."""
        if not deaf or (self._compiled is not None and not self._compiled.any()):
            self._hear_modules(not deaf)

    def _rest(self, rests: bool) -> None:
        """The program is left alone from now on, or is not any more."""
        self.seams.resting = rests
        self.steps.resting.quiet = rests and self._compiled is not None and not self._compiled.any()
        if rests:
            self.updates.forget_clips()
        else:
            self._deaf(False)

    def _never_rests(self) -> str:
        """Why the program is never left alone; "" if it may be."""
        if self.ranks.several() and not self.steps.rest.keeps:
            return "several ranks train"
        compiled = self._compiled is not None and self._compiled.any()
        zeroes = self.steps.resting.zeroes or self.steps.rest.cycle.zeroes
        if self.steps.references.seen and (compiled or zeroes):
            return REFERS  # it is not known there what models are given, or make
        return ""

    def _follows(self, optimizer: Optimizer) -> bool:
        return (self.others.none or optimizer in self.optimizers) and not only_estimates(optimizer)

    def _trouble(self, what: str) -> None:
        """Something of ours went wrong: said at once, the first time; the notes tell of all."""
        if self._troubled:
            return
        self._troubled = True
        _log.warning("narrowgauge: %s. Training goes on; the run's notes say what is missing.", what)
        with suppress(Exception):  # the writer may be what failed
            line = self.ledger.line
            self._writer.add_event(self.ledger.steps if line is None else line.step, "watch_failed", what)

    def _model_taken(self, added: str) -> None:
        facts = self.roots.facts()
        self._writer.update_meta(**facts)  # known from now on, should the run be killed
        self.ranks.know(facts)
        if added:
            line = self.ledger.line
            step = self.ledger.steps + 1 if line is None or self.steps.made else line.step
            self._writer.add_event(step, "model_changed", f"The program added to its model: {added}.")

    def _part(self, failed: bool) -> None:
        """The program takes its ranks' group down, perhaps because it has `failed`."""
        try:
            self.ranks.old_store.part()
            unseen_by_modes(self.steps.part, failed=failed)
        except Exception as error:
            self.hearing.failed("destroy_process_group", error)

    def _copies(self, site: str) -> int | None:
        first = self.plain.shown.copies.get(site)
        return first if first is not None else self.roots.copies(site)

    def _mesh(self, site: str) -> int | None:
        return self.plain.shown.meshes.get(site, self.roots.conversions.mesh(site))

    def finish(self, *, failed: bool = False) -> None:
        """The program ended, or `failed`: close the last step and write everything."""
        heard = not self.seams.telling or OURS in _global_optimizer_post_hooks
        self.ranks.know(self.roots.facts())
        unseen_by_modes(self.steps.finish, failed=failed, heard=heard)
        self.abandon()
        self.steps.report(done=True)

    def abandon(self) -> None:
        """Hear nothing of the program any more, and leave no hook in it: it ended, or this is a forked child."""
        compiled = () if self._compiled is None else (self._compiled.close,)
        roots, graphs = self.roots, self.graphs.callables
        with ExitStack() as undone:  # all of them, though a model of the program may raise where it is asked something
            for undo in reversed(
                (
                    roots.settle,
                    self.seams.close,
                    *compiled,
                    self.plain.end,
                    roots.leave,
                    graphs.leave,
                    self.ranks.forget,
                )
            ):
                undone.callback(undo)

    def facts(self) -> dict[str, Any]:
        """What the run's metadata says of how it went."""
        probe, steps, conversions = self._probe, self.steps, self.roots.conversions
        pace = steps.ledger.rows.pace.note(self.plain.choice.why(), once=self.recorder.collector.why_slow())
        few = self.roots.taken and too_few(self.plan, self.recorder.selection, steps.ledger.steps, conversions.observed)
        return {
            **self.roots.facts(),
            "steps": steps.ledger.steps,
            "nan_steps": steps.ledger.rows.nonfinite_steps,
            "skipped_steps": steps.ledger.rows.skipped_steps,
            "optimizers": self.optimizers_made,
            "backwards": self.updates.backwards,
            "peak_memory_bytes": steps.memory.bytes(),
            "watch": {
                "every": self.plan.every,
                "update_share": steps.moved_share,
                **steps.ledger.rows.pace.facts(),
                **steps.rest.facts(self.ranks.in_brief),
                **({"steps_in_graphs": self.plain.choice.steps} if self.plain.choice.steps else {}),
                **self.recorder.facts(),
            },
            **self.ranks.facts(),
            **steps.evals.facts(),
            **steps.batches.facts(),
            "not_found": not_found(
                *(self.optimizers_made, steps.ledger.steps, self.roots, self.updates),
                scripted=self.meeting.scripted,
                others=self.others.train,
                converting=bool(self.plan.recipe),
                elsewhere=self.ranks.others_have("loss"),
                estimates=self._estimates,
                forks=self.forks,
                closed=CLOSED in self.plain.notes,
                gone=self.others.gone,
            ),
            "notes": [
                *self.notes,
                *self.hearing.notes,
                *self.graphs.notes,
                *self.updates.notes,
                *self.roots.notes,
                *conversions.notes,
                *conversions.unmet,
                *steps.notes,
                *steps.rest.notes(steps.ledger.steps, self.ranks.in_brief),
                *steps.batches.notes,
                *(self._inner.notes if self._inner is not None else ()),
                *steps.evals.notes,
                *steps.references.notes,
                *(self.loading.notes if self.plan.compiling else ()),
                *self.plain.notes,
                *self.ranks.notes,
                *self.recorder.notes,
                *filter(None, [few, pace, host.why_not()]),
            ],
            "judged_by": self.plan.judge,
            "gradients_not_seen": self.plain.shown.ungraded.names,
            **(self.plain.kept_high if self.plan.recipe else {}),
            "unrecorded": few or ("" if conversions.observed else self.plain.shown.unrecorded),
            "unmet": [*conversions.unmet, *self.recorder.notes],  # of the settings: told once more when it ends
            "same_weights": [] if probe is None else [{"recipe": name, **asdict(row)} for name, row in probe.results],
            "same_weights_notes": [] if probe is None else list(probe.notes),
            "refusal": conversions.refusal,
            "flops": None if probe is None else probe.flops,
        }
