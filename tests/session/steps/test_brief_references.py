"""Brief rows of programs that call their model without gradients on a batch that waits for its backward."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from tests.session.steps.alone import Functions, Model, batch, notes, nothing_is_compiled, run
from tests.session.steps.test_brief import BETWEEN, EACH, with_rows_of_each
from torch import nn

from narrowgauge.session.models.calls import Calls

__all__ = ["nothing_is_compiled"]  # a fixture for each test here, too


class Returns(Model):
    """Returns a loss beside what it made, as Hugging Face's models; perhaps by none of torch's functions."""

    measure = staticmethod(F.mse_loss)

    def forward(self, x, labels=None):
        y = super().forward(x)
        return {"y": y, **({} if labels is None else {"loss": self.measure(y, labels)})}


class Wrapper(nn.Module):
    """Calls what it wraps, as those of torch's do that train on several devices."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def by_hand(y, labels):
    return (y - labels).square().mean()


def referring(what, every=1):
    """A program with a reference in each step, or in one of so many."""

    def program(losses):
        model = Returns()
        if "by hand" in what:
            model.measure = by_hand
        called = model
        if "wrapped" in what:  # what is trained is called through it, the reference without
            called = Wrapper(model)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for number in EACH:
            for part in (0, 1):
                x, labels = batch(number + 50 * part), batch(number + 50 * part)
                y = called(x=x, labels=labels)["y"]
                loss = F.softplus(y).mean()
                if what == "behind backward":
                    loss.backward()
                reference = torch.zeros(())
                if number % every == 0:
                    with torch.no_grad():
                        called.train(what != "eval")
                        if what == "written":
                            labels.add_(1.0)
                        reference = model(x=x.clone() if "other" in what else x, labels=labels)["y"]
                        if "measured" in what:
                            F.l1_loss(reference, labels)
                        called.train()
                if what != "behind backward":
                    (loss + (y - reference).square().mean()).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    return program


def told(session):
    return [note for note in session.facts()["notes"] if "before it was known" in note]


EVALUATED = ["behind backward", "eval", "other", "written", "wrapped, other"]
REFERENCES = ["itself", "by hand", "wrapped", "measured", "wrapped, measured"]


@pytest.mark.parametrize("what", [*EVALUATED, *REFERENCES])
def test_what_is_an_evaluation_is_one_in_brief_rows_too_and_what_is_a_reference_is_none(tmp_path, what):
    _, _, whole = run(tmp_path, referring(what), "all")
    session, writer = with_rows_of_each(tmp_path, referring(what))
    assert list(writer.column("loss")) == EACH
    wanted, found = whole.column("eval_loss"), writer.column("eval_loss")
    assert bool(wanted) is (what in EVALUATED)
    if what in EVALUATED and what != "eval":  # the first was in a step that nobody had looked at
        assert session.steps.rest.steps == len(BETWEEN) - 1
        assert [at for at in wanted if at not in found] == [2]
        assert len(told(session)) == 1
        assert "between a call with gradients and the next step (after step 2)" in told(session)[0]
    else:
        assert session.steps.rest.steps == len(BETWEEN)
        assert found == wanted
        assert not told(session)


@pytest.mark.parametrize("what", [*EVALUATED, *REFERENCES])
def test_one_that_comes_seldom_is_told_apart_as_well(tmp_path, what):
    """The first is in a step that nobody looked at: its loss is left out, and the next row is whole."""
    _, _, whole = run(tmp_path, referring(what, 3), "all")
    session, writer = with_rows_of_each(tmp_path, referring(what, 3))
    assert list(writer.column("loss")) == EACH
    assert session.steps.rest.steps == len(BETWEEN) - (what != "eval")
    wanted, found = whole.column("eval_loss"), writer.column("eval_loss")
    assert [at for at in wanted if at not in found] == [2] * (what in EVALUATED and what != "eval")


@pytest.mark.parametrize("what", REFERENCES)
def test_a_reference_that_is_known_takes_the_short_way_and_counts_as_by_the_long_one(tmp_path, monkeypatch, what):
    _, whole, _ = run(tmp_path, referring(what), "all")
    long, begins = [], Calls.begins

    def counted(self, *given):
        long.append(self.learns())
        return begins(self, *given)

    monkeypatch.setattr(Calls, "begins", counted)
    _, session, _ = run(tmp_path, referring(what), "loss")
    assert long.count(False) == 2 * (len(EACH) - ("wrapped" not in what) * len(BETWEEN))
    wanted = whole.facts()["notes"]
    assert [note for note in session.facts()["notes"] if note in wanted] == wanted


def test_one_between_two_steps_is_never_doubted(tmp_path):
    def program(losses):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for number in EACH:
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(F.mse_loss(model(x), x).item())

    session, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("eval_loss")) == EACH
    assert not session.steps.resting.careful


class Beside(Model):
    """Is given what another model made, beside a batch or alone."""

    def forward(self, made, x=None):
        return super().forward(made if x is None else made + x)


@pytest.mark.parametrize("what", ["made", "of the step before"])
def test_what_the_step_was_not_given_as_data_is_evaluated(tmp_path, what):
    batches = [batch(1), batch(4)]

    def program(losses):
        torch.manual_seed(0)
        model, other = Beside(), Model()
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 1e-2)
        for number in EACH:
            x, before = batches[number % 2], batches[1 - number % 2]
            made = other(x)
            loss = F.mse_loss(made, x)
            loss.backward()
            made = made.detach()
            y = model(made, x)
            with torch.no_grad():
                F.l1_loss(model(made if what == "made" else before), x)
                again = model(made, x)  # which is a reference
            loss = (y - again + 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    _, _, whole = run(tmp_path, program, "all")
    _, writer = with_rows_of_each(tmp_path, program)
    found, wanted = writer.column("eval_loss"), whole.column("eval_loss")
    assert len(wanted) > 20
    assert len(wanted) - len(found) <= 1


def called_as(kind):
    """A model, what is called of it, and its optimizer."""
    model = Model()
    called = torch.compile(model, backend="eager", dynamic=True) if kind == "compiled" else model
    return model, called, torch.optim.SGD(model.parameters(), 1e-2)


@pytest.mark.parametrize("kind", ["compiled", "zeroes"])
def test_what_is_not_known_there_has_whole_rows(tmp_path, kind):
    def program(losses):
        _, called, optimizer = called_as(kind)
        for number in EACH:
            x = batch(number)
            for part in range(1 + (kind == "zeroes")):
                if part:
                    optimizer.zero_grad()
                y = called(x)
                with torch.no_grad():
                    reference = called(x)
                F.mse_loss(y, x + reference).backward()
            optimizer.step()
            optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("grad_norm")) == EACH
    assert session.steps.rest.steps == 0
    assert "calls its model without gradients on batches that it trains on" in notes(session)[0]


@pytest.mark.parametrize("kind", ["", "compiled", "zeroes"])
@pytest.mark.parametrize("every", [1, 3])
def test_evaluations_in_mid_step_and_between_steps_are_what_they_are_in_whole_rows(tmp_path, every, kind):
    def evaluated(model, number, losses):
        with torch.no_grad():
            losses.append(F.mse_loss(model(batch(number)), batch(number)).item())

    def program(losses):
        model, called, optimizer = called_as(kind)
        for number in EACH:
            x = batch(number)
            if kind == "zeroes":
                F.mse_loss(called(x), x).backward()
                optimizer.zero_grad()
            loss = F.mse_loss(called(x), x)
            if number % every == 0:
                evaluated(model, 200, losses)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 2 == 0:
                evaluated(model, 100, losses)

    _, _, whole = run(tmp_path, program, "all")
    session, writer = with_rows_of_each(tmp_path, program)
    assert writer.column("eval_loss") == whole.column("eval_loss")
    assert session.steps.rest.steps == len(BETWEEN) - 1


class Told(torch.Tensor):
    """A class of the program's, that is told of each of torch's functions."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Told.seen += 1
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("what", ["mode", "class"])
def test_what_the_program_is_told_of_torchs_functions_has_none_of_ours(tmp_path, what):
    def program(losses):
        model, seen, Told.seen = Model(), [], 0
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for number in EACH:
            x = batch(number)
            x = x.as_subclass(Told) if what == "class" else x
            y = model(x)
            with torch.no_grad(), Functions(seen if what == "mode" else []):
                reference = model(x)
            (y - reference + 1).square().mean().as_subclass(torch.Tensor).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses += [len(seen), Told.seen * (what == "class")]

    session, _ = with_rows_of_each(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)


class Raises:
    """Is returned by a model, and refuses to be looked at: its labels are missing, say."""

    def __init__(self, y):
        self.y = y

    @property
    def loss(self):
        raise ValueError("there are no labels")


@dataclass
class RaisesAsGiven:
    """Is given to it."""

    x: int = 0

    def __getattribute__(self, name):
        if name == "x":
            raise ValueError("there are no labels")
        return super().__getattribute__(name)


@pytest.mark.parametrize("what", ["given", "returned"])
def test_what_raises_as_it_is_looked_at_is_kept_from_the_program(tmp_path, what):
    class Hands(Model):
        def forward(self, x):
            y = super().forward(x if isinstance(x, torch.Tensor) else torch.ones(1, 16))
            return Raises(y) if what == "returned" else y

    def program(losses):
        model = Hands()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for number in EACH:
            x = batch(number)
            y = model(x)
            with torch.no_grad():
                reference = model(x)
                if what == "given" and number in (6, 15):
                    model(RaisesAsGiven())
            if what == "returned":
                y, reference = y.y, reference.y
            loss = (y - reference + 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    seen = []
    for scalars in ("all", "loss"):
        found = []
        watch = {"scalars": scalars}
        with followed(tmp_path, compiling=True, judge="current", watch=watch, every=10) as (session, _):
            program(found)
        seen.append((found, [note for note in session.facts()["notes"] if "there are no labels" in note]))
    assert seen[0] == seen[1]
    assert bool(seen[0][1]) is (what == "given")  # an output that refuses to say its loss has none


@pytest.mark.parametrize("at", [5, 15])
def test_gradients_that_are_set_to_zero_for_once_make_no_evaluation_of_a_reference(tmp_path, at):
    def program(losses):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for number in EACH:
            x = batch(number)
            if number == at:
                F.mse_loss(model(batch(100)), batch(100)).backward()
                optimizer.zero_grad()
            y = model(x)
            with torch.no_grad():
                reference = model(x)
                losses.append(F.l1_loss(reference, x).item())
            (y - reference + 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    assert not writer.column("eval_loss")
    assert list(writer.column("loss")) == EACH
    assert session.steps.rest.steps


@pytest.mark.parametrize(
    ("tries", "every", "later"), [(True, 1, False), (True, 1, True), (True, 3, False), (False, 1, False)]
)
def test_references_in_a_closure_that_sets_gradients_to_zero(tmp_path, tries, every, later):
    """An optimizer may call it several times: what it tries has references, too."""

    def program(losses):
        model = Model()
        kind = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
        optimizer = kind if tries else torch.optim.SGD(model.parameters(), 1e-2)
        for number in EACH:
            x, called = batch(number), []

            def closure(number=number, x=x, called=called):
                optimizer.zero_grad()
                if not tries:
                    F.mse_loss(model(x), x).backward()
                    optimizer.zero_grad()
                y, reference = model(x), torch.zeros(())
                if number % every == 0:
                    with torch.no_grad():
                        reference = model(x)
                        if called or not later:  # by the first call nothing has come between
                            losses.append(F.l1_loss(reference, x).item())
                called.append(x)
                loss = (y - reference + 1).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    session, writer = with_rows_of_each(tmp_path, program)
    assert not writer.column("eval_loss")
    assert bool(session.steps.rest.steps) is tries
