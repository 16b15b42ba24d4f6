"""Rank 0 takes what ranks have sent: a step's scalars may come with a later one's table."""

from contextlib import nullcontext

import torch

from narrowgauge.session.ranks.landing import Landing
from narrowgauge.session.ranks.layout import Layout
from narrowgauge.session.ranks.parts import MOST, Parts, PartsByStep
from narrowgauge.session.ranks.scalars import Waiting

NAMES = ("tokens", "data_digest")


class Rows:
    """Keeps what is written."""

    newest_scalars = 0

    def __init__(self):
        self.of = {}

    def add_scalars(self, step, **values):
        self.of[step] = values


class Arrived:
    """A gather that has ended."""

    def __init__(self, layouts, tables):
        size = max(one.cuts[2] for one in layouts)
        self.rows = torch.zeros(len(layouts), size, dtype=torch.float64)
        for row, one, table in zip(self.rows, layouts, tables, strict=True):
            row[one.cuts[1] : one.cuts[2]] = torch.from_numpy(table).reshape(-1)

    def check(self):
        pass

    def beside(self):
        return nullcontext()


def landed(*steps):
    """The rows of what is landed of these: per step its ranks' operands, and the rows of scalars that ride with it."""
    written = Rows()
    landing = Landing(written, lambda packed: None, 2)
    for step, operands, riding in steps:
        layouts = [
            Layout(operands=each, scalars=NAMES, rows=len(riding), copies=(None,) * len(each)) for each in operands
        ]
        tables = []
        for rank in range(2):
            waiting = Waiting()
            for at, told in riding:
                waiting.add(at, dict(zip(NAMES, told[rank], strict=True)))
            tables.append(waiting.take(NAMES, len(riding)))
        landing.receive(step, layouts, Arrived(layouts, tables), [])
        landing.look(wait=True)
    return written.of


def test_scalars_that_come_late_are_merged_by_the_layouts_of_their_own_step():
    """Experts first, whose ranks have batches of their own, then stages, one of which feeds the other."""
    experts = ("gate:input", "experts.0:input"), ("gate:input", "experts.1:input")
    stages = ("0:input",), ("1:input",)
    own, fed = ((2.0, 7.0), (2.0, 8.0)), ((4.0, 7.0), (4.0, 8.0))
    rows = landed((1, experts, []), (2, stages, [(1, own)]), (3, stages, [(2, fed)]))
    assert {step: row["tokens"] for step, row in rows.items()} == {1: 4.0, 2: 4.0}


def test_a_step_between_recorded_ones_is_as_the_one_before_and_those_before_all_as_the_first():
    def parts(kind):
        return Parts([kind] * 2, [None] * 2, [""] * 2, [kind] * 2)

    steps = PartsByStep(2)
    assert steps.at(3) == parts("")
    for step, kind in ((10, "a"), (20, "a"), (30, "b"), (40, "a")):
        steps.add(step, parts(kind))
    assert [steps.at(step).kinds[0] for step in (1, 10, 29, 30, 39, 40, 99)] == list("aaabbaa")
    for step in range(50, 50 + 2 * MOST):
        steps.add(step, parts(str(step)))
    assert steps.at(49 + 2 * MOST) == parts(str(49 + 2 * MOST))  # what is older is let go
