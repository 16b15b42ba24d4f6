"""The shortcut where what the model is given is looked at: gradients set to zero in mid-step, and references.

What such steps say is compared with steps that are looked at, as in `steps/test_usual.py`.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import (
    AROUND,
    Functions,
    Model,
    batch,
    compared,
    evaluated,
    made,
    nothing_is_compiled,
    run,
)
from tests.session.test_shortcut import FEWEST, calls, is_the_shortcuts, ours
from torch.utils.checkpoint import checkpoint

from narrowgauge.session.shortcut.looks import Looks

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

LAST, ODD = 24, 14


class Training:
    """A program whose steps are alike but for one, and where the shortcut was when each of them began."""

    def __init__(self, odd=None):
        self.odd, self.taken, self.calls = odd, [], []

    def __call__(self, losses):
        self.model, self.optimizer = made()
        self.losses, self.batches = losses, [batch(number) for number in range(LAST + 1)]
        for number in range(1, LAST + 1):
            self.taken.append(any(map(is_the_shortcuts, ours())))
            odd = self.odd if number == ODD else None
            self.calls = calls(lambda number=number, odd=odd: self.made(number, odd)) if number == LAST else []
            if number < LAST:
                self.made(number, odd)

    def made(self, number, odd):
        try:
            self.step(number, odd)
        except RuntimeError:
            self.losses.append(-1.0)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, number, odd):
        raise NotImplementedError

    def backward(self, x, amid=False):
        loss = F.mse_loss(self.model(x), x)
        if amid:
            self.losses.append(evaluated(self.model))
        loss.backward()
        self.losses.append(loss.item())


class Sharp(Training):
    """Looks at each batch twice."""

    def step(self, number, odd):
        x = self.batches[number]
        if odd == "thrice":
            self.backward(x)
            self.optimizer.zero_grad()
        self.backward(x, amid=odd == "evaluates first")
        if odd == "evaluates":
            self.losses.append(evaluated(self.model))
        if odd == "asks":
            with torch.no_grad():
                self.losses.append(F.l1_loss(self.model(x), x).item())
        if odd == "raises":
            self.model(x)
            raise RuntimeError("out of memory")
        if odd == "one layer's":
            self.model.up.zero_grad()
        elif odd != "adds":
            self.optimizer.zero_grad(set_to_none=odd != "to zeros")
        if odd == "calls more":
            self.model(x)
            self.backward(self.batches[number - 1])
        self.backward(self.batches[number - 1] if odd == "another" else x.clone() if odd == "copied" else x)
        if odd == "no number":
            y = self.model(x)
            y.backward(torch.ones_like(y))


class Adversarial(Training):
    """Throws away what it has of each batch, and trains on another."""

    def step(self, number, odd):
        x = self.batches[number].clone().requires_grad_()
        self.backward(x)
        moved = (x + 0.1 * x.grad.sign()).detach()
        if odd in ("late", "later"):
            if odd == "later":
                self.model(moved)
            loss = F.mse_loss(self.model(moved), moved)
            self.optimizer.zero_grad()
            loss.backward()
            self.losses.append(loss.item())
            return
        self.optimizer.zero_grad()
        if odd == "raises":
            raise RuntimeError("out of memory")
        if odd == "evaluates":
            self.losses.append(evaluated(self.model))
        self.backward(x.detach() if odd == "the same" else moved)
        if odd == "once more":
            self.optimizer.zero_grad()
            self.backward(moved.clone())


class Refers(Training):
    """Asks the model without gradients on each batch that it trains on."""

    def step(self, number, odd):
        x = self.batches[number]
        if odd == "microbatches":
            self.part(self.batches[number - 1], None)
        self.part(x, odd)

    def part(self, x, odd):
        if odd == "checkpointed":
            y = checkpoint(self.model, x.requires_grad_(), use_reentrant=True)
        else:
            y = self.model(x)
        if odd == "evaluates":
            self.losses.append(evaluated(self.model))
        if odd == "raises":
            raise RuntimeError("out of memory")
        if odd == "zeroes":
            self.optimizer.zero_grad()
        if odd == "behind backward":
            y.mean().backward(retain_graph=True)
        self.model.train(odd != "in evaluation mode")
        given = {"of before": self.batches[ODD - 1], "what it made": y.detach(), "a part": x[:1]}.get(odd, x)
        with torch.no_grad(), Functions([]) if odd == "in a mode" else nullcontext():
            reference = self.model(given)
            if odd == "twice":
                reference = reference + self.model(x)
            if odd is not None:
                self.losses.append(F.l1_loss(reference, given).item())
        self.model.train()
        loss = (y - reference.mean() + 1).square().mean()
        loss.backward()
        self.losses.append(loss.item())


class Checkpointed(Refers):
    """Its model is called again in each backward."""

    def part(self, x, odd):
        model = self.model
        self.model = lambda x: checkpoint(model, x, use_reentrant=False)
        self.model.train = model.train
        super().part(x, odd)
        self.model = model


class SharpCheckpointed(Sharp):
    """The same."""

    def step(self, number, odd):
        model = self.model
        self.model = lambda x: checkpoint(model, x, use_reentrant=False)
        super().step(number, odd)
        self.model = model


SHARP = [
    *("evaluates", "evaluates first", "calls more", "asks", "raises", "adds", "another", "no number", "one layer's"),
    *("to zeros", "thrice", "copied"),
]
ADVERSARIAL = ["late", "later", "raises", "evaluates", "the same", "once more"]
REFERS = [
    *("microbatches", "evaluates", "raises", "zeroes", "behind backward", "in evaluation mode"),
    *("in a mode", "of before", "what it made", "a part", "twice", "checkpointed", "measured"),
]
PROGRAMS = [*((Sharp, odd) for odd in SHARP), *((Adversarial, odd) for odd in ADVERSARIAL)]
PROGRAMS += [*((Refers, odd) for odd in REFERS)]


@pytest.mark.parametrize("kind", [Sharp, Adversarial, Refers, Checkpointed, SharpCheckpointed])
def test_each_step_takes_few_functions(tmp_path, kind):
    program = kind()
    run(tmp_path, program, "loss", every=1000)
    assert all(program.taken[len(AROUND) + 1 :])
    assert "Looks.trains" in program.calls
    assert not [name for name in program.calls if name.startswith(("CallsAlone", "UpdatesAlone", "Resting"))]
    assert len(program.calls) <= FEWEST + 40, program.calls  # of SAM, whose checkpoints call it again


@pytest.mark.parametrize(("kind", "odd"), PROGRAMS)
def test_a_step_that_is_otherwise_is_as_by_the_long_way(tmp_path, kind, odd):
    compared(tmp_path, kind(odd), steps=LAST - (odd == "raises"))
    _, whole, every = run(tmp_path, kind(odd), "all")
    _, session, brief = run(tmp_path, program := kind(odd), "loss")
    assert program.taken[ODD - 1]
    assert session.steps.thrown_away == whole.steps.thrown_away
    for name in ("loss", "lr", "eval_loss"):
        found, wanted = brief.column(name), every.column(name)
        assert {at: wanted[at] for at in found} == found, name
    assert set(every.column("loss")) - set(brief.column("loss")) <= {ODD}


@pytest.mark.parametrize("amid", ["a loss", "an optimizer"])
def test_a_reference_is_left_in_its_midst(tmp_path, amid):
    """What it returns counts once, as in all other steps."""

    class Returns(Model):
        odd = False

        def forward(self, x):
            y = super().forward(x)
            if self.odd and amid == "a loss":
                F.l1_loss(y, x)
            elif self.odd:
                torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
            return (y - x).square().mean()

    def program(losses):
        model = Returns()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for number in range(1, LAST + 1):
            x = batch(number)
            loss = model(x)
            model.odd = number == ODD
            with torch.no_grad():
                reference = model(x)
            model.odd = False
            (loss - 0.1 * reference).backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    compared(tmp_path, program)
    _, session, brief = run(tmp_path, program, "loss")
    assert not brief.column("eval_loss")
    assert session.steps.evals._counts.metrics == LAST


def test_what_a_checkpoint_runs_first_without_gradients_is_no_reference(tmp_path, monkeypatch):
    found, refers = [], Looks.refers
    monkeypatch.setattr(Looks, "refers", lambda *given: found.append(refers(*given)) or found[-1])

    def program(losses):
        model, optimizer = made()
        for number in range(1, LAST + 1):
            x = batch(number).requires_grad_()
            y = model(x)
            if number == ODD:
                y = y + checkpoint(model, x, use_reentrant=True)
            with torch.no_grad():
                reference = model(x)
            loss = (y - reference + 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    run(tmp_path, program, "loss", every=1000)
    assert found.count(False) == 1
    assert all(found[: found.index(False)])


def test_what_an_optimizer_tries_gives_the_step_no_batch(tmp_path):
    def program(losses):
        model, _ = made()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for number in range(1, LAST + 1):
            x, other, called = batch(number), batch(number + 50), []

            def closure(number=number, x=x, other=other, called=called):
                optimizer.zero_grad()
                called.append(other if number == ODD and len(called) == 1 else x)
                y = model(called[-1])
                with torch.no_grad():
                    reference = model(called[-1])
                    if number == ODD and len(called) == 2:
                        losses.append(F.l1_loss(reference, called[-1]).item())
                loss = (y - reference.mean() + 1).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    compared(tmp_path, program)
