"""The ranks of a program as one: each recorded step's tables are gathered once, merged on the device, written once.

    end of recorded step s     the table stays on the device; the store is told that it is ready        offer
    LAG steps later            all ranks decide alike (agreement.py): one gather, or each for itself     tick
    as it arrives              rank 0 merges, beside the program's own work, and writes                  tick
    end of program             the same for what is still open, waiting for seconds at most              finish
    end of its group           the same; other ranks, or the same ones, may meet again                   part

What ranks merge goes one way (together.py), what each writes for itself another (apart.py). Whatever fails on the first
(a store that is gone, a backend that is missing, ranks that die) is noted, and from then on all goes the second, as it
does in a program of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.errors import let_pass
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.stats.transfer import Packed
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.plan import Plan
from narrowgauge.session.ranks.agreement import LAG
from narrowgauge.session.ranks.apart import Apart
from narrowgauge.session.ranks.gone import in_words
from narrowgauge.session.ranks.group import MEETING
from narrowgauge.session.ranks.landing import Landing
from narrowgauge.session.ranks.meeting import Meeting, Met, programs_own
from narrowgauge.session.ranks.old_store import OldStore
from narrowgauge.session.ranks.open_step import OpenStep, Told
from narrowgauge.session.ranks.patience import Patience, has_ended, has_part, may_come
from narrowgauge.session.ranks.scalars import Waiting
from narrowgauge.session.ranks.together import Together

PATIENCE = 3.0  # seconds for other ranks at the end of the program, for each of: decisions, gathers, last words
LATE = 12.0  # more, for all of these together and for ranks that still meet: all less than launchers wait
HURRY = 1.0  # all of these where an error ends it: others may be waiting in a collective for this process to be gone
TRIES = 64  # recorded steps in a row that were not merged, before no further one is tried
MOST_BYTES = 2 << 30  # gathered on rank 0; beyond, ranks stay apart


class Ranks:
    """This rank's part in it.

    Args:
        plan: its `every`, and whether every rank's own rows are kept as well (`watch.ranks`).
        writer: this rank's.
        collector: whose recorded steps come here first.
        told: what is known of its tensors.
        further: collectors of recipes that look as well, by name; their rows are merged with the step's own.
        meet: the program's ranks, None as long as it has none; asked until there are some.
    """

    def __init__(
        self,
        plan: Plan,
        writer: RunWriter,
        collector: Collector,
        told: Told,
        further: Mapping[str, Collector] | None = None,
        meet: Callable[[], Met | None] | None = None,
    ) -> None:
        self._plan, self._writer, self._collector, self._told = plan, writer, collector, told
        self._all = Meeting(meet)
        self.notes: list[str] = []
        self._off = False
        self.dear = self.short = False  # as ranks agreed last: see `Decision`
        self._waiting = Waiting()
        self._together = Together(self._all, self._waiting, collector.account)
        self._meet = meet
        self.old_store = OldStore()
        self._past: list[Together] = []  # with the ranks of groups that the program has taken down
        self._own: RunWriter | None = None
        self._known: dict[str, Any] = {}
        self._apart = Apart(self._keep, writer)
        self._collectors = {"": collector, **(further or {})}
        self._beside: list[Packed] = []  # of the step whose own rows are about to be offered
        collector.outlet = self.offer
        for by, each in (further or {}).items():
            each.outlet = partial(self._lay_beside, by)

    @property
    def _rows(self) -> int:
        """Rows of scalars that ride with a recorded step: in a program without troubles all that wait by then."""
        return min(2 * (self._plan.every + LAG) + 8, 4096)

    # What the session's other parts hand over.

    def offer(self, step: int, packed: list[Packed]) -> bool:
        """A recorded step ended; whether it is seen to here."""
        if not self.several():
            return False
        if self._own is not None:
            self._collector.keep(packed, self._own)
        beside, self._beside = self._beside, []
        try:
            if self._off:
                raise RuntimeError("ranks are not merged")
            mine = OpenStep.of(step, [*packed, *beside], self._told, self._waiting.names, self._rows)
            if beside and mine.size * 8 * self._all.world > MOST_BYTES:
                self._apart.keep_further(beside)
                beside = []
                mine = OpenStep.of(step, packed, self._told, self._waiting.names, self._rows)
            if mine.size * 8 * self._all.world > MOST_BYTES:
                raise RuntimeError(
                    f"{self._all.world} tables of {mine.size * 8 >> 20} MiB are more than the {MOST_BYTES >> 20} MiB "
                    "that rank 0 gathers; record fewer sites"
                )
            self._together.add(mine, dear=self._told.dear(), short=self._told.short())
        except Exception as error:
            self._failed(error)
            self._apart.keep([*packed, *beside])
        return True

    def _lay_beside(self, by: str, step: int, packed: list[Packed]) -> bool:
        """A further recipe's rows of the same step, before its own; whether they are seen to here."""
        if not self.several():
            return False
        self._beside += [replace(each, by=by) for each in packed]
        return True

    def _keep(self, packed: Sequence[Packed]) -> None:
        for each in packed:
            self._collectors[each.by].keep([each])

    @staticmethod
    def world() -> int:
        """How many ranks the program has now, met or not."""
        met = programs_own()
        return 1 if met is None else met.world

    @property
    def merging(self) -> bool:
        """Whether it is one of several, and they have not given up to merge."""
        return self.several() and not self._off

    def all_short(self, mine: Callable[[], bool]) -> bool:
        """Whether steps are short on all ranks, where these merge, or rows would differ by rank; else here."""
        return self.short if self.merging else mine()

    def several(self) -> bool:
        """Whether this is one of several ranks that know each other, and merge what each has told."""
        if self._all.world:
            return self._all.world > 1
        if not self._all.find():
            return False
        try:
            self._together.begin()
            if self._writer.rank != self._all.rank:
                raise RuntimeError(f"rank {self._all.rank} of the process group writes as rank {self._writer.rank}")
            if self._all.rank == 0:
                self._together.landing = Landing(self._writer, self._keep, self._all.world)
                self._writer.update_meta(merged_within=self._rows)  # readers wait so many steps for what all say
            if self._plan.watch.get("ranks") and self._own is None:
                meta = {"command": " ".join(self._plan.command), "variant": self._plan.variant, **self._known}
                meta |= {"recipe": self._plan.recipe, "judged_by": self._plan.judge}
                # `beside`: the interpreter's end would close it before the session hands over the last steps.
                folder, rank = self._plan.folder / "ranks", self._all.rank
                self._own = RunWriter(folder, meta, rank=rank, beside=self._writer)
        except Exception as error:
            self._failed(error)
        return True

    def add_scalars(self, step: int, **values: float) -> None:
        """A step's scalars have arrived from this rank's device."""
        if self._own is not None:
            self._own.add_scalars(step, **values)
        merging = self.merging
        # Rank 0's stand for all until they are superseded: so they are there before anybody may take them to be merged.
        if self._all.rank == 0 or not merging:
            self._writer.add_scalars(step, **values)
        if merging:
            oldest = self._waiting.add(step, values)
            if oldest is not None and self._all.rank:
                self._writer.add_scalars(oldest[0], **oldest[1])

    def held_by(self, tell: Callable[[], None]) -> None:
        """Somebody holds rows back, and is asked to `tell` them before some are taken to be merged."""
        self._waiting.tell = tell

    def know(self, facts: Mapping[str, Any]) -> None:
        """What the run says of its models: the run of the ranks' own rows is read by itself, and says so as well."""
        self._known |= facts
        if self._own is not None:
            self._own.update_meta(**facts)

    def tick(self, step: int) -> None:
        """Step `step` is next: a place that every rank passes between the same two steps.

        It is where an optimizer has stepped, and not where the next forward begins: in a pipeline that waits for what
        another stage sends, which would not come from one that waits here for this one.
        """
        if self._together:
            unseen_by_modes(self._come_by, step)

    def _come_by(self, step: int) -> None:
        with self._collector.guard(self._failed):
            self._together.launch()
            while self._together.due(step):
                self._resolve(MEETING)
            self._together.land()

    @property
    def met(self) -> bool:
        """Whether there are others that it has met."""
        return self._all.world > 1

    def part(self, *, failed: bool = False) -> None:
        """The program takes down the group of its ranks: settle what is open, and let go of what they met by."""
        if not self.met:
            return
        self._end(failed=failed, parts=True)
        self._past.append(self._together)
        self._all = Meeting(self._meet)
        self._together = Together(self._all, self._waiting, self._collector.account)
        self._off = self.dear = self.short = False
        self._apart.end()

    def finish(self, *, failed: bool = False) -> None:
        """The program ended, or `failed`: settle what is open, in seconds."""
        self._end(failed=failed)
        if self._own is not None:
            self._collector.flush()
            self._own.close("failed" if failed else "complete")
            if self._own.problem:
                self.notes.append(f"watch.ranks: it ended early, and rows of it are missing: {self._own.problem}")

    def _end(self, *, failed: bool, parts: bool = False) -> None:
        living = self._may_come, self._has_ended
        patience = Patience(HURRY, HURRY, _nobody) if failed else Patience(PATIENCE, LATE, *living)
        if parts and not all(map(self._together.is_here, range(self._all.world))):
            patience = Patience(0.0, 0.0, _nobody)  # who is not watched may make the next group already
        with self._collector.guard(self._failed):
            self._together.end()
            self._settle(patience)
        with self._collector.guard(self._failed):
            if self.several():
                self._lacks(self._together.last_words(self._writer, patience, merging=not self._off))
        self._together.stop()
        with self._collector.guard(self._failed):
            self._together.close(broken=self._off)
        if parts:
            self._all.leave()
        self._keep_unmerged()

    @property
    def in_brief(self) -> int:
        """Of how many merged steps the row is brief, as it was on any rank."""
        return sum(each.landing.in_brief for each in self._all_together() if each.landing is not None)

    def _all_together(self) -> list[Together]:
        """What it had and has in common with others, the latest last."""
        return [*self._past, self._together]

    def others_have(self, scalar: str) -> bool:
        """Whether this is rank 0 and another one told of such a scalar: a pipeline's loss is its last stage's."""
        return any(each.landing is not None and scalar in each.landing.told for each in self._all_together())

    def forget(self) -> None:
        """This is a forked child, or all is over: nothing here is its own."""
        self.old_store.close()
        self._off = True
        self._together.forget()

    def facts(self) -> dict[str, Any]:
        """For the run's metadata; nothing in a program of one rank."""
        several = [each for each in self._all_together() if each.world > 1]
        if not several:
            return {}
        backends = [each.backend for each in several if each.backend is not None]
        merged = {
            "world": max(each.world for each in several),
            "merged_steps": sum(each.merged for each in several),
            "apart_steps": self._apart.steps,
            "backend": backends[-1] if backends else None,
        }
        return {"ranks": merged}

    # Deciding.

    def _resolve(self, patience: float) -> None:
        """Do with the oldest open step what all ranks do with it."""
        mine, decision = self._together.open[0], self._together.decide()
        self.dear |= decision.dear
        if decision.merge:
            self.short = decision.short
            self._together.gather(mine, decision.size, patience)
            self._apart.end()
        else:
            self._apart.tell(mine.step, self._together.missing(), self._all.rank, self._all.world)
            self._apart.keep(mine.packed)
            self._together.open.popleft()
            if self._apart.in_a_row >= TRIES:
                self._end_merging()
                self.notes.append(f"After {TRIES} recorded steps in a row without all ranks, none was merged any more.")

    # The end, and other ways out.

    def _settle(self, patience: Patience) -> None:
        if self._together.open:
            self._together.wait(patience)
        while self._together.open:
            began = time.monotonic()
            self._resolve(patience.spare)
            patience.spent(time.monotonic() - began)
        self._together.settle(patience)

    def _may_come(self, rank: int) -> bool:
        """Not one that has no part of the run here and never made a step: it trains nothing."""
        folder = self._writer.path
        return may_come(folder, rank) and (has_part(folder, rank) or self._together.is_here(rank))

    def _has_ended(self, rank: int) -> bool:
        return has_ended(self._writer.path, rank)

    def _lacks(self, what: str) -> None:
        if what:
            self.notes.append(f"Ranks were not waited for: {what}.")
            self._writer.add_event(self._writer.newest_scalars, "ranks_apart", self.notes[-1])

    def _failed(self, error: Exception) -> None:
        """Give up merging: everything that is open is written by its own rank."""
        if not self._off:
            self._end_merging()
            self._together.end_gathers()
            cause = in_words(error, self._writer.path, self._all.rank, self._all.world)
            self.notes.append(f"Ranks are not merged, each records its own rows: {cause}")
            first = next((mine.step for mine in self._together.steps()), 0)
            self._writer.add_event(first, "ranks_apart", self.notes[-1])
            self._together.give_up()
        self._keep_unmerged()
        let_pass(error)

    def _end_merging(self) -> None:
        """No further step is merged, and no reader waits for one."""
        self._off = True
        if self._writer.rank == 0:
            self._writer.update_meta(merged_within=0)

    def _keep_unmerged(self) -> None:
        """Write this rank's own rows of all that is open."""
        for mine in self._together.steps():
            self._apart.keep(mine.packed)
        self._together.clear()
        if self._all.rank:
            for step, row in self._waiting.rest():
                self._writer.add_scalars(step, **row)


def _nobody(rank: int) -> bool:
    return False
