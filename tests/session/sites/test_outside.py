"""Whether a recorded step is listened to for products outside of layers: where there is one, its numbers are there."""

import pytest
import torch
from tests.session.sites.recorded import Rows, same
from torch import nn
from torch.nn import functional as F

from narrowgauge.observe.stats import Collector
from narrowgauge.session.sites.outside import SELDOM, WARM, Outside
from narrowgauge.session.sites.plain_sites import PlainSites

LINEAR, MATMUL = F.linear, torch.Tensor.__matmul__


class Program:
    """Recorded steps of a model, each with its rows; `heard` says of each whether torch's functions were its own."""

    def __init__(self, model, *, compiles=False):
        self.model, self.heard, self.rows = model, [], []
        self._writer = Rows()
        self._collector = Collector(self._writer, every=1)
        self.sites = PlainSites("current", eager=True, training=lambda: True, compiles=lambda: compiles)
        self.sites.add(model, self._collector)

    def step(self, run):
        self._writer.rows = {}
        self._collector.begin_step(len(self.heard) + 1)
        self.sites.begin()
        self.heard.append(F.linear is not LINEAR)
        assert (torch.Tensor.__matmul__ is not MATMUL) == self.heard[-1]
        run()
        self.sites.end()
        self._collector.flush()
        assert F.linear is LINEAR
        assert torch.Tensor.__matmul__ is MATMUL
        self.rows.append(self._writer.rows)

    @property
    def notes(self):
        return " ".join(self.sites.notes)


def two():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def test_where_layers_tell_of_every_weight_it_is_listened_to_now_and_then():
    model, x = two(), torch.randn(8, 16)
    program = Program(model)
    for _ in range(2 * SELDOM + 2):
        program.step(lambda: model(x).square().mean().backward())
    assert program.heard == [n < WARM or n % SELDOM == 0 for n in range(2 * SELDOM + 2)]
    for rows in program.rows:
        assert sorted(rows) == [f"{n}:{role}" for n in (0, 1) for role in ("grad_output", "input", "weight")]
        same(rows, "0", x, "input")
    assert program.notes == ""


def test_a_step_in_which_nothing_was_multiplied_is_none_of_the_first():
    model, x = two(), torch.randn(8, 16)
    program = Program(model)
    for n in range(WARM + 3):
        program.step((lambda: None) if n < 3 else lambda: model(x).square().mean().backward())
    assert all(program.heard)


def test_what_was_heard_once_is_listened_for_in_every_step():
    model, x = two(), torch.randn(8, 16)
    program = Program(model)
    for _ in range(SELDOM + 3):  # a tied weight: its layer multiplies by it as well
        program.step(lambda: F.linear(model(x), model[0].weight).square().mean().backward())
    assert all(program.heard)
    for rows in program.rows:
        assert rows["0:input"]["numel"] == 2 * x.numel()
    assert program.notes == ""


def test_a_weight_that_no_layer_has_told_of_is_listened_for():
    model, x = two(), torch.randn(8, 16)
    model.register_parameter("later", nn.Parameter(torch.randn(16, 16)))
    program = Program(model)
    for n in range(SELDOM + 3):
        late = n == SELDOM + 2
        program.step(lambda: (F.linear(model(x), model.later) if late else model(x)).square().mean().backward())  # noqa: B023
    assert all(program.heard)
    same(program.rows[-1], "later", model.later, "weight")


def test_what_only_looks_up_is_no_such_weight():
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16)), torch.arange(8)
    program = Program(model)
    for _ in range(WARM + 1):
        program.step(lambda: model(ids).square().mean().backward())
    assert program.heard == [True] * WARM + [False]


def test_what_begins_late_is_heard_at_the_next_look_from_then_on_and_a_note_says_so():
    model, x = two(), torch.randn(8, 16)
    program = Program(model)
    for n in range(3 * SELDOM):
        y = (lambda: F.linear(model(x), model[1].weight)) if n > WARM else lambda: model(x)
        program.step(lambda: y().square().mean().backward())  # noqa: B023
    numbers = [int(rows["1:input"]["numel"]) // x.numel() for rows in program.rows]
    assert numbers == [1] * SELDOM + [2] * (2 * SELDOM)
    assert program.heard[SELDOM:] == [True] * (2 * SELDOM)
    assert f"of up to {SELDOM - 1} before that one, they may be missing" in program.notes


def test_another_model_is_listened_to_from_its_beginning():
    model, other, x = two(), nn.Sequential(nn.Linear(16, 16)), torch.randn(8, 16)
    program = Program(model)
    for _ in range(WARM + 1):
        program.step(lambda: model(x).square().mean().backward())
    program.sites.add(other, program._collector)
    for _ in range(WARM + 1):
        program.step(lambda: other(model(x)).square().mean().backward())
    assert program.heard == [True] * WARM + [False] + [True] * WARM + [False]


def test_what_a_program_compiles_runs_uncompiled_and_is_always_listened_to():
    model, x = two(), torch.randn(8, 16)
    program = Program(model, compiles=True)
    for _ in range(WARM + 2):
        program.step(lambda: model(x).square().mean().backward())
    assert all(program.heard)


@pytest.mark.parametrize("lacks", [True, False])
def test_whether_a_weight_is_lacking_is_asked_once(lacks):
    asked = []
    known = Outside(lambda: asked.append(1) or lacks)
    for _ in range(WARM):
        known.ended(some=True)
    assert [known.expected(), known.expected()] == [lacks, lacks]
    assert asked == [1]
    known.begin_anew()
    assert known.expected()
