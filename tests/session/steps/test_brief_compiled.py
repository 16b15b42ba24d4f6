"""Programs that compile are left alone between recorded steps as others are, and have no graph more for it."""

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from tests.compute.nn.compiled_steps import Counted, Plain
from tests.session.steps.alone import SAME, Model, batch, evaluated, notes, run
from torch import nn
from torch._dynamo.utils import counters

import narrowgauge as ng
from narrowgauge.session.attach import Session
from narrowgauge.session.doors.entries import Entries
from narrowgauge.session.steps.updates import Updates

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's
]
EACH = list(range(1, 25))
WHOLE = [1, 2, 10, 20]
BETWEEN = [at for at in EACH if at not in WHOLE]
PARTS = {"loss", "learn", "by", "update", "whole"}
IN_BRIEF = {"loss", "lr", "step_seconds", "clean", "nonfinite"}


class Evaluates(Plain):
    """Calls its closure in something compiled."""

    evaluate = None

    def step(self, closure=None):
        loss = self.evaluate(closure)
        super().step()
        return loss


class Training:
    """Of which what `ways` name is compiled, from its making on or at step `late`, and `called` from a step on."""

    def __init__(self, *ways, backend, kind=torch.optim.AdamW, late=0, called=1):
        self.ways, self.late, self.first = ways, late, called
        self.compile = functools.partial(torch.compile, backend=backend)
        self.backend = backend
        self.called = self.model = Model()
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.by = self.optimizer.step
        if kind is Evaluates:
            self.optimizer.evaluate = self.compile(lambda closure: closure())
        if not late:
            self.compiles()

    def compiles(self):
        self.made = {name: self.compile(getattr(self, name)) for name in PARTS & set(self.ways)}
        if "model" in self.ways:
            self.made["called"] = self.compile(self.model)
        if "in place" in self.ways:
            self.model.compile(backend=self.backend)

    def loss(self, x):
        return F.mse_loss(self.called(x), x)

    def learn(self, x):
        loss = self.loss(x)
        if "itself, too" in self.ways:
            loss = loss + self.model(x + 1).square().mean()
        if "by name" in self.ways:
            torch.autograd.backward(loss)
        else:
            loss.backward()
        return loss

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.by()

    def whole(self, x):
        if "closure" in self.ways:
            loss = self.by(lambda: self.learn(x))
            self.optimizer.zero_grad()
            return loss
        loss = self.learn(x)
        if "twice" in self.ways:
            self.learn(x + 1)
        self.update()
        self.optimizer.zero_grad()
        return loss

    def run(self, losses):
        for number in EACH:
            if number == self.late:
                self.compiles()
            if number == max(self.first, self.late):
                vars(self).update(self.made)
            x = batch(3 * number)[: 2 if number == 15 and "another shape" in self.ways else 4]
            if "falling" in self.ways:
                self.optimizer.param_groups[0]["lr"] = 0.01 / number
            losses.append(self.whole(x).item())
            if "evaluated" in self.ways and not number % 4:
                losses.append(evaluated(self.called))


def counted(backend, program):
    """What `program` returns, given a backend, and what torch's compiler counts meanwhile."""
    gc.collect()  # optimizers and what was compiled before
    compiler = Counted(backend)
    found = program(compiler.backend)
    return found, {
        "graphs": compiler.graphs,
        "unique": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "frames": dict(counters["frames"]),
    }


def no_more(found, than):
    """Whether as much was compiled; frames, of which ours may be some, are no more."""
    frames, most = found["frames"], than["frames"]
    return {**found, "frames": 0} == {**than, "frames": 0} and all(frames[kind] <= most[kind] for kind in frames)


def compared(tmp_path, *ways, backend="eager", **how):
    """The session and the writer of a program in brief, beside the same with whole rows of each step, and unwatched."""

    def train(losses, compiler):
        Training(*ways, backend=compiler, **how).run(losses)
        return losses

    def watched(scalars, every=10):
        def training(compiler):
            return run(tmp_path, functools.partial(train, compiler=compiler), scalars, every=every)

        return counted(backend, training)

    unwatched, without = counted(backend, lambda compiler: train([], compiler))
    (wanted, _, every), whole = watched("all")
    (losses, session, writer), found = watched("loss")
    assert losses == wanted
    assert no_more(found, whole)
    if "closure" not in ways:  # with one there is another
        assert no_more(found, without)
    for name in (*SAME, "eval_loss"):
        there = writer.column(name)
        assert there == {at: every.column(name)[at] for at in there}, name
    assert set(writer.column("lr")) == set(every.column("lr")) == set(EACH)
    assert set(writer.column("eval_loss")) == set(every.column("eval_loss"))
    (alone, _, _), graphs = watched("recorded", every=1000)  # so nothing runs uncompiled
    assert alone == unwatched
    assert no_more(graphs, whole)
    return session, writer


WAYS = {
    "in place": ["in place", "falling", "evaluated", "another shape"],
    "learn": ["learn", "falling"],
    "step": ["by"],
    "all in parts": ["loss", "update", "evaluated", "another shape"],
    "model and step": ["model", "by", "evaluated"],
    "whole": ["whole", "another shape"],
    "twice": ["whole", "twice"],
    "backward by name": ["learn", "by name"],
    "whole closure": ["whole", "closure"],
    "closure": ["by", "closure"],
    "closure of a compiled model": ["model", "closure"],
}


def settings(folder, scalars):
    file = folder / "narrowgauge.toml"
    file.write_text(f'[watch]\nscalars = "{scalars}"\n')
    return file


def brief(session, writer):
    assert not notes(session)
    assert session.steps.rest.steps == len(BETWEEN)
    assert all(set(writer.scalars[at]) - {"eval_loss"} == IN_BRIEF for at in BETWEEN)
    assert all("grad_norm" in writer.scalars[at] for at in WHOLE)


@pytest.mark.parametrize("case", WAYS)
def test_its_rows_are_brief_and_its_graphs_as_many(tmp_path, case):
    brief(*compared(tmp_path, *WAYS[case]))


@pytest.mark.parametrize("case", ["loss", "model", "in place"])
def test_a_model_that_is_called_itself_beside_what_is_compiled_of_it_is_no_other(tmp_path, case):
    session, writer = compared(tmp_path, case, "itself, too")
    brief(session, writer)
    assert session.roots.taken == 1


def test_nor_is_one_whose_call_is_another_s_step(tmp_path):
    def program(losses):
        critic, generator = Model(), Model()
        by = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, generator)]
        learn = torch.compile(lambda x, made: F.mse_loss(critic(x), x) - critic(made).tanh().mean(), backend="eager")
        for number in EACH:
            x = batch(3 * number)[:4]
            made = generator(x)
            for optimizer in by:
                loss = learn(x, made.detach()) if optimizer is by[0] else -critic(made).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    wanted, _, every = run(tmp_path, program, "all")
    losses, session, writer = run(tmp_path, program, "loss")
    assert losses == wanted
    assert writer.column("loss") == every.column("loss")
    assert writer.column("turn") == every.column("turn")
    assert session.steps.rest.steps > 24
    assert session.roots.taken == 2
    assert not notes(session)


@pytest.mark.parametrize("case", ["by", "update", "whole"])
def test_so_are_those_of_an_optimizer_that_steps_in_a_graph(tmp_path, case):
    brief(*compared(tmp_path, case, kind=Plain))


@pytest.mark.parametrize(
    ("case", "called", "steps"),
    [
        *((case, 1, len(BETWEEN)) for case in ("model", "in place", "update")),
        ("by", 14, len(BETWEEN)),
        ("loss", 1, 0),  # of a model that is called in such a graph nobody hears
        ("loss", 14, 16),
    ],
)
def test_what_was_compiled_before_we_listened_has_no_graph_more(tmp_path, monkeypatch, case, called, steps):
    """Though it is called, for the first time, while the program is left alone."""
    before = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]  # of other tests
    heard = Session.optimizer_made
    monkeypatch.setattr(
        Session,
        "optimizer_made",
        lambda self, made, *given: None if any(made is each for each in before) else heard(self, made, *given),
    )

    def training(compiler, scalars):
        made, losses = Training(case, backend=compiler, called=called), []
        if not scalars:
            made.run(losses)
            return losses
        with ng.watch(made.model, out=tmp_path / scalars, config=settings(tmp_path, scalars)):
            made.run(losses)
        return losses, ng.open_run(tmp_path / scalars)

    unwatched, without = counted("eager", lambda compiler: training(compiler, ""))
    (wanted, every), whole = counted("eager", lambda compiler: training(compiler, "all"))
    (losses, brief), found = counted("eager", lambda compiler: training(compiler, "loss"))
    assert losses == wanted == unwatched
    assert no_more(found, whole)
    assert no_more(whole, without)
    assert brief.scalars("loss")["loss"].tolist() == every.scalars("loss")["loss"].tolist()
    assert brief.meta["watch"].get("steps_in_brief", 0) == steps


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("case", ["in place", "loss", "by", "whole"])
def test_so_are_those_of_a_program_that_compiles_late(tmp_path, monkeypatch, case, heard):
    """Whether torch tells of each call or, its compiler not being loaded before, does not yet."""
    if not heard:
        monkeypatch.setattr(Entries, "open", lambda self: False)
    brief(*compared(tmp_path, case, late=14))


def test_so_are_those_of_an_optimizer_that_calls_its_closure_in_a_graph(tmp_path):
    brief(*compared(tmp_path, "closure", kind=Evaluates))


def test_what_is_clipped_in_a_graph_is_told_for_whole_rows_alone(tmp_path, monkeypatch):
    told, clipped = [], Updates.gradients_clipped

    def follow(self, *given):
        told.append(given)
        clipped(self, *given)

    monkeypatch.setattr(Updates, "gradients_clipped", follow)
    brief(*run(tmp_path, lambda losses: Training("update", backend="eager", kind=Plain).run(losses), "loss")[1:])
    assert len(told) == len(WHOLE)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_so_are_those_with_other_backends(tmp_path, backend):
    brief(*compared(tmp_path, "loss", "update", backend=backend))


def test_another_model_that_is_compiled_meanwhile_has_whole_rows(tmp_path):
    session, writer = compared(tmp_path, "model", late=14)
    assert notes(session)[0].endswith("about step 14 was not as before: each step has a whole row since.")
    assert [at for at in EACH if "grad_norm" not in writer.scalars[at]] == [at for at in BETWEEN if at < 14]


def test_so_has_one_that_a_function_is_compiled_of(tmp_path):
    def program(losses):
        nets = Model(), Model()
        optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.01)
        for number in EACH:
            x = batch(3 * number)[:4]
            if number in (1, 14):
                learn = torch.compile(lambda x, net: F.mse_loss(net(x), x), backend="eager")
            loss = learn(x, nets[number >= 14])
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    _, session, writer = run(tmp_path, program, "loss")
    assert notes(session)[0].endswith("about step 14 was not as before: each step has a whole row since.")
    assert list(writer.column("loss")) == EACH
