"""Steps that are left alone and as the one before take the fewest functions; and anything else ends that.

What such steps say is compared with steps that are looked at in `steps/test_usual.py` and all that uses `compared`.
"""

import contextlib
import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from tests.session.steps.alone import (
    AROUND,
    Model,
    batch,
    compared,
    evaluated,
    made,
    notes,
    nothing_is_compiled,
    run,
    step,
)
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.session.steps.rows import StepRows

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

FEWEST = 9  # functions of ours in a step of one backward on a CPU, by a loss function of torch's


def once(model, optimizer, number, losses):
    """A step with one microbatch, clipping."""
    x = batch(number)
    loss = F.mse_loss(model(x), x)
    loss.backward()
    losses.append(loss.item())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def ours():
    """What stands in the places that the shortcut takes."""
    hooks = (
        nn.modules.module._global_forward_pre_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    places = torch.autograd.backward, nn.utils.clip_grad_norm_, nn.utils.clip_grad._get_total_norm
    return [*(hook for each in hooks for hook in each.values()), *places]


def is_ours(function):
    return "narrowgauge" in function.__code__.co_filename


def is_the_shortcuts(function):
    return "narrowgauge/session/shortcut/" in function.__code__.co_filename


def calls(function):
    """The names of our functions that run in it."""
    found = []

    def told(frame, event, _):
        if event == "call" and "narrowgauge/session" in frame.f_code.co_filename:  # layers of other tests count steps
            found.append(frame.f_code.co_qualname)

    sys.setprofile(told)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def resting(tmp_path):
    """A session of a program that has made three steps, and is left alone; and the program."""
    watch = {"scalars": "loss"}
    with followed(tmp_path, compiling=True, judge="current", watch=watch, every=1000) as (session, writer):
        before = ours()
        model, optimizer = made()
        for number in range(1, 4):
            once(model, optimizer, number, [])
        assert session.steps.rest.on
        yield session, writer, model, optimizer, before
    assert not any(map(is_the_shortcuts, ours()))


def test_a_usual_step_takes_few_functions(resting):
    _, _, model, optimizer, _ = resting
    found = min((calls(lambda: once(model, optimizer, 4, [])) for _ in range(3)), key=len)  # or rows are written
    assert 5 <= len(found) <= FEWEST, found


def test_meanwhile_torchs_own_functions_are_in_their_places(resting):
    session, _, model, optimizer, before = resting
    taken = ours()
    assert taken != before
    assert any(map(is_the_shortcuts, taken))
    assert not any(map(is_ours, taken[-2:]))
    session.steps.resting.wake()
    assert ours() == before
    once(model, optimizer, 4, [])
    assert session.steps.ledger.steps == 4


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    loss = F.mse_loss(model(batch(4)), batch(4))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def compiled(model, optimizer):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    once(model, optimizer, 4, [])


def optimizer_made(model, optimizer):
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    once(model, optimizer, 4, [])


def twice(model, optimizer):
    for _ in range(2):
        F.mse_loss(model(batch(4)), batch(4)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("what", [scaled, compiled, optimizer_made, twice])
def test_what_is_otherwise_ends_it(resting, what):
    session, _, model, optimizer, before = resting
    what(model, optimizer)
    assert ours() == before
    assert session.steps.ledger.steps == 4


def test_an_evaluation_is_heard_and_the_step_behind_it_is_looked_at(resting):
    session, writer, model, optimizer, _ = resting
    wanted = evaluated(model)
    once(model, optimizer, 4, [])
    once(model, optimizer, 5, [])
    session.finish()
    assert writer.column("eval_loss") == {3: pytest.approx(wanted)}
    assert list(writer.column("loss")) == [1, 2, 3, 4, 5]


class Again:
    """A program that calls backward twice in its fifteenth step, and throws the first away, or not."""

    def __init__(self, way):
        self.way = way

    def __call__(self, losses):
        model, optimizer = made()
        for number in range(1, 25):
            if number == 15:
                F.mse_loss(model(batch(40)), batch(40)).backward()
                if self.way == "none":
                    optimizer.zero_grad()
                elif self.way == "zero":
                    optimizer.zero_grad(set_to_none=False)
                elif self.way == "module":
                    model.zero_grad()
            once(model, optimizer, number, losses)


@pytest.mark.parametrize("way", ["none", "zero", "module", "kept"])
def test_a_backward_more_whose_gradients_are_thrown_away_or_not(tmp_path, way):
    program = Again(way)
    compared(tmp_path, program)
    _, _, every = run(tmp_path, program, "all")
    _, _, brief = run(tmp_path, program, "loss")
    assert (15 in brief.column("loss")) == (way == "kept")
    assert {at: loss for at, loss in every.column("loss").items() if at in brief.column("loss")} == brief.column("loss")


@pytest.mark.parametrize("way", ["none", "zero", "module", "kept"])
def test_the_same_with_an_evaluation_behind_it(tmp_path, way):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            if number == 6:
                F.mse_loss(model(batch(40)), batch(40)).backward()
                if way in ("none", "zero"):
                    optimizer.zero_grad(set_to_none=way == "none")
                elif way == "module":
                    model.zero_grad()
                losses.append(evaluated(model))
            once(model, optimizer, number, losses)

    compared(tmp_path, program)


class Operations(TorchDispatchMode):
    """One of the program's, that is told of each operation."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_around_a_backward_more_sees_what_the_program_does_alone(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            loss = F.mse_loss(model(batch(number)), batch(number))
            loss.backward(retain_graph=True)
            if number == 6:
                with Operations(losses):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    compared(tmp_path, program)


@pytest.mark.parametrize("evaluates_at", [5, 7])
def test_a_model_whose_hooks_the_program_takes_out_is_heard_of(resting, evaluates_at):
    session, writer, model, optimizer, _ = resting
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()
    for number in range(4, 9):
        once(model, optimizer, number, [])
        if number == evaluates_at:
            wanted = evaluated(model)
    session.finish()
    assert writer.column("eval_loss") == {evaluates_at: pytest.approx(wanted)}


def test_an_evaluation_behind_an_interrupted_hook_of_the_programs_is_heard(resting):
    session, writer, model, optimizer, _ = resting

    def interrupts(*_):
        raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupts, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        once(model, optimizer, 4, [])
    hook.remove()
    wanted = evaluated(model)
    once(model, optimizer, 4, [])
    session.finish()
    assert writer.column("eval_loss") == {3: pytest.approx(wanted)}
    assert session.facts()["steps"] == 4


def test_what_the_program_puts_in_their_places_meanwhile_stays(resting):
    session, writer, model, optimizer, before = resting
    seen, backward, ordinary = [], torch.autograd.backward, before[-3]

    def told(*args, **kwargs):
        seen.append("backward")
        return backward(*args, **kwargs)

    torch.autograd.backward = told
    try:
        once(model, optimizer, 4, [])
        session.steps.resting.wake()
        losses = []
        once(model, optimizer, 5, losses)
        once(model, optimizer, 6, losses)
        assert torch.autograd.backward is told
    finally:
        torch.autograd.backward = ordinary
    assert len(seen) == 3
    session.finish()
    assert writer.column("loss")[5] == losses[0]


@pytest.mark.parametrize("taken", [True, False])
def test_what_goes_wrong_with_rows_is_kept_from_the_program(tmp_path, monkeypatch, taken):
    def full(self):
        raise OSError("no space left on device")

    monkeypatch.setattr("narrowgauge.session.shortcut.step_hooks.TOGETHER", 1)
    monkeypatch.setattr("narrowgauge.session.steps.rows.TOGETHER", 1)
    if not taken:
        monkeypatch.setattr("narrowgauge.session.shortcut.shortcut.MOST_IN_VAIN", 0)
    watch = {"scalars": "loss"}
    with followed(tmp_path, compiling=True, judge="current", watch=watch, every=1000) as (session, _):
        model, optimizer = made()
        for number in range(1, 9):
            once(model, optimizer, number, [])
            if number == 4:
                monkeypatch.setattr(StepRows, "overdue", full)
        monkeypatch.undo()
    assert session.steps.ledger.steps == 8
    assert [note for note in session.facts()["notes"] if "no space left on device" in note]


def test_a_copy_of_the_model_is_another_one(resting):
    session, writer, model, optimizer, _ = resting
    twin = copy.deepcopy(model)
    with torch.no_grad():
        F.mse_loss(twin(batch(100)), batch(100))
    once(model, optimizer, 4, [])
    session.finish()
    assert list(writer.column("eval_loss")) == [3]


def test_rates_that_a_step_changes_itself_are_those_it_stepped_with(tmp_path):
    class Falling(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.5

    def program(losses):
        model, optimizer = made(Falling)
        for number in range(1, 25):
            once(model, optimizer, number, losses)

    compared(tmp_path, program)
    _, _, brief = run(tmp_path, program, "loss")
    assert brief.column("lr")[14] == 0.01 * 0.5**13


@pytest.mark.parametrize("where", ["before backward", "behind it", "without it"])
@pytest.mark.parametrize("beside", [False, True])
def test_rates_that_a_closure_sets_are_those_it_stepped_with(tmp_path, where, beside):
    """Another optimizer beside it, of which they are set behind that, steps with those."""

    def program(losses):
        model, _ = made()
        groups = [{"params": [model.up.weight], "lr": 0.02}, {"params": [model.up.bias]}]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        other = torch.optim.SGD(model.down.parameters(), lr=0.03)

        def falls(optimizer):
            optimizer.param_groups[0]["lr"] *= 0.9

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch(1)), batch(1))
            if where != "behind it":
                falls(optimizer)
            if where == "without it":
                model.up.weight.grad = torch.autograd.grad(loss, model.up.weight)[0]
            else:
                loss.backward()
            if where == "behind it":
                falls(optimizer)
            losses.append(loss.item())
            return loss

        for _ in range(24):
            optimizer.step(closure)
            if beside:
                falls(other)
                other.step()

    compared(tmp_path, program)
    _, _, every = run(tmp_path, program, "all")
    _, _, brief = run(tmp_path, program, "loss")
    for name in ("lr_0", "lr_1", "lr_2"):
        assert brief.column(name) == every.column(name)
    assert every.column("lr_1")


def test_a_loss_in_float64_is_told_in_float32_by_the_last_step_too(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            loss = F.mse_loss(model(batch(number)).double(), batch(number).double())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    compared(tmp_path, program)


def test_accumulated_microbatches_take_it_as_well(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 13):
            step(model, optimizer, number, losses)
        found.append(calls(lambda: step(model, optimizer, 13, losses)))

    found = []
    wanted, _, _ = run(tmp_path, program, "all", every=1000)
    kept, _, _ = run(tmp_path, program, "loss", every=1000)
    assert kept == wanted
    assert "CallsAlone.passes" not in found[1]
    assert 5 <= len(found[1]) <= 34 < len(found[0])


def test_a_model_that_calls_itself_in_one_step_goes_on_as_before(tmp_path):
    """What runs as the shortcut is left is the call around the one that ends it."""

    class Looks(Model):
        looks = False

        def forward(self, x):
            if self.looks and torch.is_grad_enabled():
                with torch.no_grad():
                    x = x + 0 * self(x)
            return super().forward(x)

    def program(losses):
        model = Looks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 25):
            model.looks = number == 5
            once(model, optimizer, number, losses)

    session, _ = compared(tmp_path, program)
    assert session.steps.rest.steps == 24 - len(AROUND)
    _, session, brief = run(tmp_path, program, "loss")
    assert list(brief.column("loss")) == list(range(1, 25))
    assert session.steps.rest.steps == 20
    assert not notes(session)


@pytest.mark.parametrize(("odd", "missing"), [(30, [1, 2, 3]), (10, [1, 2, 3, *range(11, 51)])])
def test_it_is_taken_again_behind_a_step_that_was_otherwise_where_it_was_worth_it(tmp_path, odd, missing):
    taken = []

    def program(losses):
        model, optimizer = made()
        for number in range(1, 51):
            taken.append(any(map(is_the_shortcuts, ours())))
            loss = F.mse_loss(model(batch(number)), batch(number))
            with Operations([]) if number == odd else contextlib.nullcontext():
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    run(tmp_path, program, "loss", every=1000)
    assert [number for number, is_it in enumerate(taken, 1) if not is_it] == missing
