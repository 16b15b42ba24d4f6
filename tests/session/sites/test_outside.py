"""Whether a recorded step is listened to for products outside of layers: where there is one, its numbers are there."""

import itertools

import pytest
import torch
from tests.session.sites.compiled_programs import Compiles
from tests.session.sites.recorded import Rows, same
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import open_run
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.sites.outside import FAR, NEAR, WARM, Outside
from narrowgauge.session.sites.plain_sites import PlainSites

LINEAR, MATMUL = F.linear, torch.Tensor.__matmul__


class Program:
    """Recorded steps of a model, each with its rows; `heard` says of each whether torch's functions were its own."""

    def __init__(self, model, *, compiles=False):
        self.model, self.heard, self.rows = model, [], []
        self._writer = Rows()
        self._collector = Collector(self._writer, every=1)
        self.sites = PlainSites("current", eager=True, training=lambda: True, compilations=Compiles(some=compiles))
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
    for _ in range(8 * FAR):
        program.step(lambda: model(x).square().mean().backward())
    looks = [n for n, heard in enumerate(program.heard) if heard]
    assert looks[:WARM] == list(range(WARM))
    gaps = {after - before for before, after in itertools.pairwise(looks[WARM - 1 :])}
    assert NEAR <= min(gaps) < max(gaps) <= FAR
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
    for _ in range(WARM + FAR):  # a tied weight: its layer multiplies by it as well
        program.step(lambda: F.linear(model(x), model[0].weight).square().mean().backward())
    assert all(program.heard)
    for rows in program.rows:
        assert rows["0:input"]["numel"] == 2 * x.numel()
    assert program.notes == ""


def test_a_weight_that_no_layer_has_told_of_is_listened_for():
    model, x = two(), torch.randn(8, 16)
    model.register_parameter("later", nn.Parameter(torch.randn(16, 16)))
    program = Program(model)
    for n in range(WARM + FAR):
        late = n == WARM + FAR - 1
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


@pytest.mark.parametrize("period", [1, 2, 3, 7, 8, 16])
def test_what_begins_late_is_heard_at_a_look_however_it_takes_turns_and_a_note_says_so(period):
    model, x = two(), torch.randn(8, 16)
    program, wanted = Program(model), []
    for n in range(240):
        outside = n > WARM and n % period == period - 1
        wanted.append(1 + outside)
        y = (lambda: F.linear(model(x), model[1].weight)) if outside else lambda: model(x)
        program.step(lambda: y().square().mean().backward())  # noqa: B023
    numbers = [int(rows["1:input"]["numel"]) // x.numel() for rows in program.rows]
    first = numbers.index(2)
    assert numbers[first:] == wanted[first:]
    assert all(program.heard[first:])
    if period == 1:
        assert first < WARM + FAR
    missed = program.heard[:first].count(False)
    assert missed > 0
    assert f"when {missed} recorded step" in program.notes


class Mine(nn.Linear):
    """With a forward of its own: its product is heard inside of it."""

    def forward(self, x):
        return F.linear(x, self.weight * 2.0)


def derived():
    return nn.Sequential(nn.Linear(16, 16), Mine(16, 16))


def computed():
    return nn.Sequential(nn.Linear(16, 16), torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))


@pytest.mark.parametrize("make", [derived, computed])
def test_a_layer_that_does_not_tell_of_its_product_is_listened_to(make):
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 16)
    program = Program(model)
    for _ in range(WARM + FAR):
        program.step(lambda: model(x).square().mean().backward())
    assert all(program.heard)
    w = model[1].weight.detach() * (2.0 if make is derived else 1.0)
    for rows in program.rows:
        same(rows, "1", w, "weight")


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.takes = nn.Linear(16, 16), False

    def forward(self, x):
        y = self.layer(x)
        return y @ self.later if self.takes else y


@pytest.mark.parametrize("wait", [0, 2 * WARM])
def test_a_parameter_that_a_known_module_gets_later_is_listened_for_until_it_is_heard(tmp_path, wait, monkeypatch):
    """An optimizer hears of it."""
    monkeypatch.setattr(CompiledCalls, "any", lambda self: False)  # another test may have compiled: then it always is
    torch.manual_seed(0)
    model, x, gets = Growing(), torch.randn(8, 16), WARM + 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(out=tmp_path / "run", every=1):
        for step in range(1, gets + wait + 5):
            if step == gets:
                model.later = nn.Parameter(torch.eye(16))
                optimizer.add_param_group({"params": [model.later]})
            model.takes = step >= gets + wait
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    table = run.tensors()
    seen = {step for step, site in zip(table["step"], table["site"], strict=True) if site == "later:weight"}
    assert seen == set(range(gets + wait, gets + wait + 5))
    assert "when 1 recorded step had not been listened to" in " ".join(run.meta["notes"])  # the one before it came


def test_another_model_is_listened_to_from_its_beginning():
    model, other, x = two(), nn.Sequential(nn.Linear(16, 16)), torch.randn(8, 16)
    program = Program(model)
    for _ in range(WARM + 1):
        program.step(lambda: model(x).square().mean().backward())
    program.sites.add(other, program._collector)
    for _ in range(WARM + 1):
        program.step(lambda: other(model(x)).square().mean().backward())
    assert program.heard == [True] * WARM + [False] + [True] * WARM + [False]


def test_a_model_that_is_taken_in_a_recorded_step_tells_of_its_first_call_itself():
    torch.manual_seed(0)
    model, other, x = two(), nn.ModuleDict({"other": nn.Linear(16, 16)}), torch.randn(8, 16)
    program = Program(model)

    def first():
        y = model(x)
        program.sites.add(other, program._collector)
        other["other"](y).square().mean().backward()

    program.step(first)
    for _ in range(WARM):
        program.step(lambda: other["other"](model(x)).square().mean().backward())
    assert program.heard == [True] * WARM + [False]
    assert program.rows[0].keys() == program.rows[-1].keys()
    for rows in program.rows:
        same(rows, "other", model(x), "input")
    assert not other["other"]._forward_hooks


def test_so_does_one_that_is_taken_when_a_recorded_step_is_not_listened_to():
    model, x = two(), torch.randn(8, 16)
    other = nn.ModuleDict({"other": nn.Linear(16, 16)})
    program = Program(model)
    for _ in range(WARM):
        program.step(lambda: model(x).square().mean().backward())
    program.step(lambda: (program.sites.add(other, program._collector), other["other"](model(x)).mean().backward()))
    assert program.heard == [True] * WARM + [False]
    same(program.rows[-1], "other", model(x), "input")


@pytest.mark.parametrize("late", [False, True])
def test_a_model_that_is_one_layer_is_no_product_outside_of_layers(tmp_path, late, monkeypatch):
    """A recorded step begins in its call, when torch has read which hooks it has: a probe, say, behind its encoder."""
    monkeypatch.setattr(CompiledCalls, "any", lambda self: False)
    torch.manual_seed(0)
    encoder, probe, x = two(), nn.Linear(16, 4), torch.randn(8, 16)
    heard = []
    probe.register_forward_hook(lambda *_: heard.append(F.linear is not LINEAR))

    def train(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with ng.watch(out=tmp_path / "run", every=1):
        if late:
            train(encoder, WARM + 2)
        train(probe, WARM + 2)
    assert heard == [True] * WARM + [False] * 2
    run = open_run(tmp_path / "run")
    assert not run.meta["notes"]
    table = run.tensors()
    rows = [at for at, site in enumerate(table["site"]) if site == ("Linear:input" if late else "(model):input")]
    assert [table["step"][at] for at in rows] == list(range((WARM + 2) * late + 1, (WARM + 2) * (late + 1) + 1))
    assert {int(table["numel"][at]) for at in rows} == {x.numel()}


def test_what_a_program_compiles_runs_uncompiled_and_is_always_listened_to():
    model, x = two(), torch.randn(8, 16)
    program = Program(model, compiles=True)
    for _ in range(WARM + 2):
        program.step(lambda: model(x).square().mean().backward())
    assert all(program.heard)


def test_whether_a_weight_is_lacking_is_asked_once():
    asked, lacks = [], True
    known = Outside(lambda: asked.append(1) or lacks)
    for _ in range(WARM):
        known.ended(some=True)
    assert [known.expected(), known.expected()] == [True, True]
    lacks = False
    assert known.expected()
    assert asked == [1]
    known.begin_anew()
    for _ in range(WARM):
        assert known.expected()
        known.ended(some=True)
    assert [known.expected(), known.expected()] == [False, False]
    assert asked == [1, 1]
