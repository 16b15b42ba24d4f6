"""What a step is, and what is done at its ends.

first forward with gradients, or first backward, after an optimizer's step      the next step opens
an optimizer's step (or a gradient scaler that skips it)                        it is done, and stays open for what
                                                                                still belongs to it: an evaluation
the program's end before one                                                    it was none, and leaves no rows, unless
                                                                                the program failed in it
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.optim.optimizer import Optimizer

from narrowgauge.observe.store import RunWriter
from narrowgauge.session.plan import Plan
from narrowgauge.session.ranks import Ranks
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.same_weights import SameWeightsProbe
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.steps import status, zeroed
from narrowgauge.session.steps.ledger import Ledger
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.losses import EvalLosses
from narrowgauge.session.steps.memory import PeakMemory
from narrowgauge.session.steps.references import References
from narrowgauge.session.steps.rest import Rest
from narrowgauge.session.steps.resting import Resting
from narrowgauge.session.steps.rows import StepRows
from narrowgauge.session.steps.usual import Usual
from narrowgauge.session.tensors.batches import Batches
from narrowgauge.session.tensors.counting import Width
from narrowgauge.session.tensors.movement import SCALARS, Movement
from narrowgauge.session.tensors.rooms import Room


class StopTraining(SystemExit):
    """Ends the program cleanly once it has made the steps that were asked for."""


class Steps:
    """The steps of one program; `line` is the open one's."""

    def __init__(
        self,
        plan: Plan,
        writer: RunWriter,
        recorder: Recorder,
        plain: PlainSites,
        ranks: Ranks,
        probe: SameWeightsProbe | None,
    ) -> None:
        self._plan, self._writer, self._probe = plan, writer, probe
        self._recorder, self._plain, self._ranks = recorder, plain, ranks
        self._reports = writer.rank == 0 and not plan.compiling  # one pulse is enough
        self.ledger = Ledger(StepRows(ranks, ranks.several, writer))
        writer.gather = self.ledger.rows.gather
        self.memory = PeakMemory()
        self.batches = Batches()
        self.evals = EvalLosses(lambda: self.ledger.steps + bool(self.rest.parted), self.ledger.aside)
        possible = plan.compiling and plan.steps is None and probe is None
        short = partial(ranks.all_short, lambda: self.ledger.rows.pace.short)
        scalars = plan.watch.get("scalars", "auto")
        self.rest = Rest(scalars, possible=possible, short=short, several=ranks.several)
        self.usual = Usual(self.rest, self.ledger, self.evals)
        self.resting = Resting(self.rest, self.ledger, self.evals, self.usual, recorder.passed, self._take_evaluation)
        self.references = References(self.rest, self.evals, self.batches, lambda: self.ledger.steps)
        self._fed = 0  # the last step in which a model was called with gradients
        self._recorded_steps = 0
        self._room = Room()
        self.moved_share = 1.0  # of the weights, that update ratios were measured on
        self.made = True  # an optimizer has stepped: the next forward opens a step
        self._came_by = True  # since the last step was opened, for what other ranks have agreed on with this one
        self.begun = False  # a step was opened, or is about to be
        self.stepped: set[int] = set()  # ids of the optimizers that made the last step whose line is closed
        self._doubted = False  # what the open step has may be none of it
        self.thrown_away = 0  # microbatches that no step was made of
        self.more_thrown_away = False  # perhaps, in steps that were left alone
        self.notes: list[str] = []

    @property
    def paused(self) -> bool:
        """Whether an optimizer only tries something: what models are fed and multiply meanwhile is not the step's."""
        return self._recorder.selection.paused

    @paused.setter
    def paused(self, tries: bool) -> None:
        self._recorder.selection.paused = tries

    @property
    def line(self) -> Line | None:
        """What is written of the open step."""
        return self.ledger.line

    def enter(self, *, usual: bool = False) -> None:
        """A forward with gradients, or a backward, begins: as part of the open step, or as the beginning of the next.

        The next may be left alone if it begins as `usual`, or has a part that was. Raises StopTraining when all steps
        that were asked for are made.
        """
        self.usual.interrupted()
        if self.rest.on and self.rest.called:
            self.resting.unlike()
        elif self.made or self.ledger.line is None:
            self._open(usual=usual)

    def feed(self, inputs: Any, model: int, width: Width) -> int:
        """A model, told apart by its number, is called with gradients and these inputs; returns their tokens."""
        line = self.ledger.line
        self._fed = 0 if line is None else line.step
        if line is not None and zeroed.given(line, lambda: self.batches.again(inputs)):
            self.thrown_away += zeroed.left(line)
            self.nothing_learned()
        if self._doubted:
            self.nothing_learned()
            self._recorder.begin_anew()
            self._plain.shown.begin()
        self.evals.training_begins(taught=self.ledger.aside.trained(inputs, model))
        self._doubted = False
        return self.batches.see(inputs, model=model, width=width)

    def backward_begins(self) -> None:
        """What it adds to was set to zero where a program does so between a model's call and this."""
        line = self.ledger.line
        if line is not None and zeroed.added(line):
            self.thrown_away += zeroed.left(line)
            self.ledger.keep_the_latest()

    def fed_alone(self, inputs: Any, model: int) -> None:
        """The same as `feed` of a step that is left alone, where that is asked for (`Resting.careful`)."""
        if (line := self.rest.line) is not None:
            self.thrown_away += self.references.fed(line, inputs, model, tries=self.paused)

    def nothing_learned(self) -> None:
        """What the open step has so far is none of it."""
        self.ledger.begin_anew()
        self.batches.begin_anew()

    def between(self, *, proven: bool) -> bool:
        """Whether nothing has come of the open step yet; of a thread that has `proven` nothing, but forwards."""
        line = self.line
        self.usual.interrupted()
        if self.rest.on:
            return not self.rest.called
        if self.made or (line is not None and line.zeroed):
            return True
        if line is None:
            return not self.begun
        return not line.microbatches and not (proven and line.tokens)

    def drop(self) -> None:
        """What was begun is no step: it leaves no rows, and nothing in the line."""
        self.nothing_learned()
        self._recorder.drop_step()

    def doubt(self) -> None:
        """What was begun may be no step: the next forward begins anew."""
        self._doubted = not (self.made or (self.line is not None and self.line.zeroed))

    def hand_over(self) -> None:
        """Another thread goes on."""
        self.resting.wake()
        self.doubt()
        self.paused = self.resting.tries = False
        self.ledger.hand_over()

    def end(self, *, early: bool = False) -> None:
        """An optimizer stepped, or a gradient scaler chose not to; if `early`, a compiled function is still running."""
        line = self.ledger.line
        if line is not None and line.recorded:
            self._moved()
            self._plain.end(seen=True)
        self.ledger.stepped()
        self.evals.stepped()
        self.made, self._doubted = True, False
        if not early:
            self._come_by(self.ledger.steps + 1)

    def _rests(self, usual: bool) -> bool:
        """Whether the program is left alone from now on: the step before was as usual, and so the next one begins."""
        line = self.ledger.line
        if line is None or not (self.rest.follows(line, called=self._fed == line.step) and usual):
            return False
        if not self.rest.begin(line, self._recorder.next_due(line.step)):
            return False
        self.ledger.close()
        self.batches.begin_anew()
        self._come_by(line.step + 1)
        self.usual.come_by = self._ranks.tick if self._ranks.several() else None
        self.resting.told(True)
        resting = self.resting
        zeroes, resting.zeroes = resting.zeroes or self.rest.cycle.zeroes, False
        asks = self.references.rests(able=resting.quiet and not zeroes)
        resting.careful = asks or (self.rest.keeps and zeroes)
        return True

    def left_alone(self, optimizer: Optimizer, *, skipped: bool = False, within: bool = False) -> None:
        """This optimizer has stepped, or was `skipped`, while the program is left alone; `within` a backward pass?"""
        self._came_by = self.usual.come_by is None or not self.rest.is_first(optimizer)
        self.resting.made(optimizer, skipped=skipped)
        if not within:
            self._come_by(self.ledger.steps + 1 + bool(self.rest.parted))

    def _come_by(self, step: int) -> None:
        if not self._came_by:
            self._came_by = True
            self._ranks.tick(step)

    def settle(self) -> None:
        """A compiled function returned, or must have: weights that an optimizer moved in it are in their place."""
        if self.line is not None and self.line.movement is not None and self.line.movement.settle():
            self._moved()

    def _moved(self) -> None:
        line = self.ledger.line
        if line is not None and line.movement is not None:
            for name in SCALARS:  # what an optimizer of the step told before, another one may take back
                line.scalars.pop(name, None)
            line.scalars.update(line.movement.scalars())
            self.moved_share = min(self.moved_share, line.movement.share)

    def looked(self) -> None:
        """Of the open step's layers all has been seen; what is compiled runs compiled from here on."""
        self._plain.end(seen=True)

    def left(self) -> None:
        """A model's call was left without a word: of its layers none runs any more."""
        self._plain.calls.left()

    def another_model(self) -> None:
        """A model is about to be taken: what the last step recorded is of others, though names may be alike."""
        self.begun = True
        if self.made:
            with self._left_over():
                self._recorder.end_step()

    def capture_begins(self) -> None:
        """A CUDA graph is about to be captured: of what looks at tensors, nothing may come into it."""
        self.resting.wake(now=True)
        with self._left_over():
            self._plain.end()
            self._recorder.end_step()

    def finish(self, *, failed: bool = False, heard: bool = True) -> None:
        """The program ended, or `failed`: close the last step and write everything.

        Without `heard`, optimizers' steps were not heard any more.
        """
        self.usual.over()
        if not heard:
            self.notes.append(
                "The program cleared torch's global optimizer hooks, ours among them: what stepped after step "
                f"{self.ledger.steps} was not heard."
            )
        if self.line is not None and self.ledger.unfinished:
            rows = "it is in no row"
            if not failed:
                self._recorder.drop_step()
            elif self.line.recorded:  # where it died is what somebody will look for
                rows = "its layers have rows, as far as they came"
            if self.ledger.steps and heard:
                times = self.line.microbatches
                self.notes.append(
                    f"What the program called with gradients on after step {self.ledger.steps} led to no optimizer "
                    f"step (backward: {times} time{'s' * (times != 1)}); {rows}."
                )
        if self.rest.parted:
            self.rest.called = False
            self.resting.wake()
        self._close()
        self._take_evaluation(ended=True)
        if self.rest.steps:
            self._recorder.made(self.ledger.steps)
        self.memory.sample()
        self.ledger.finish()
        self._ranks.finish(failed=failed)
        self._recorder.flush()

    def part(self, *, failed: bool = False) -> None:
        """The ranks' group goes: what they have made so far is settled with them, as if the program had ended.

        It may train on: alone, or in another group.
        """
        if not self._ranks.met:
            return
        self.resting.wake()
        if not self.ledger.unfinished:
            if self.ledger.line is not None:
                self._who_stepped(self.ledger.line)
            self._close()
            self.ledger.close()
        self.ledger.rows.finish()
        self._ranks.part(failed=failed)

    def report(self, *, done: bool = False) -> None:
        """Tell a comparison's progress display how far the program is; who watches a program has none."""
        if self._reports:
            status.report(self._plan, self.ledger, done=done)

    def _open(self, *, usual: bool = False) -> None:
        if self.rest.on:
            self.resting.unlike()
        self._close()
        if self._plan.steps is not None and self.ledger.steps >= self._plan.steps:
            raise StopTraining
        if self.ledger.line is not None:
            self._who_stepped(self.ledger.line)
        if self.rest.asked and self._rests(usual):
            return
        self.made, self.begun = False, True
        line = self.ledger.open()
        self.batches.begin_anew()
        self._come_by(line.step)
        self._came_by = False
        line.recorded = self._recorder.begin_step(line.step)
        if line.recorded:
            self._recorded_steps += 1
            line.movement = Movement(turn=self._recorded_steps, room=self._room)
            self._plain.begin()
        if self._probe is not None:
            line.disturbed |= self._probe.armed(line.step)
        if self._reports:
            self.report()

    def _who_stepped(self, line: Line) -> None:
        self.stepped = line.optimizers or self.stepped
        self._recorder.selection.stepped(line.optimizers)

    def _close(self) -> None:
        line = self.ledger.line
        if self.made and line is not None and line.recorded:
            with self.ledger.recording_ends():
                self._put_in_order(line)
        else:
            self._put_in_order(line)

    def _left_over(self) -> AbstractContextManager[None]:
        """What is done meanwhile is the cost of the step that is made, if it was recorded."""
        recorded = self.made and self.line is not None and self.line.recorded
        return self.ledger.recording_ends() if recorded else nullcontext()

    def _put_in_order(self, line: Line | None) -> None:
        if line is not None and line.movement is not None:
            self.settle()
        self._take_evaluation()
        if line is None:
            return
        line.digest = self.batches.digest
        if line.recorded:
            now = line.scalars["memory_bytes"] = self.memory.now()
            self.memory.sample(now)
            line.scalars["peak_memory_bytes"] = self.memory.bytes()
            self._recorder.end_step()

    def _take_evaluation(self, *, ended: bool = False) -> None:
        for step, loss in self.evals.take(ended=ended).items():
            self.references.evaluated = step
            if self.line is not None and self.line.step == step:
                self.line.scalars["eval_loss"] = loss
            else:  # before the first step, or while another was open already
                self.ledger.rows.add_to_earlier(step, self._writer, eval_loss=loss)
