"""Learning rates of steps that several optimizers make: the shortcut keeps those that the long way keeps."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import Functions, Model, batch, nothing_is_compiled, run
from tests.session.test_shortcut_parts import LAST, short_and_long
from torch import nn

from narrowgauge.session.shortcut.shortcut import Shortcut

__all__ = ["nothing_is_compiled"]  # a fixture for each test here


class Descent(torch.optim.Optimizer):
    """Of groups with any rates, or with none."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.01)


def one(*rates):
    """An optimizer for each rate; the last for all parameters that are left."""

    def made(model):
        parameters = [*model.parameters()]
        parts = [parameters[at : at + 1] for at in range(len(rates) - 1)] + [parameters[len(rates) - 1 :]]
        return [Descent([group(part, rate)]) for part, rate in zip(parts, rates, strict=True)]

    return made


def group(part, rate):
    return {"params": part} if rate is None else {"params": part, "lr": rate}


def groups(model):
    """One whose groups have different rates, and one of two with nothing in the second."""
    up, down = [*model.up.parameters()], [*model.down.parameters()]
    emptied = Descent([group(down, 0.03), group([nn.Parameter(torch.ones(1))], 0.04)])
    emptied.param_groups[1]["params"] = []
    return [Descent([group(up[:1], 0.01), group(up[1:], 0.02)]), emptied]


def many(model):
    """Twenty optimizers: more than have rates of their own in a row."""
    model.more = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(19))
    rates = [0.01 * (1 + at) for at in range(20)]
    left = [*model.up.parameters(), *model.down.parameters()]
    parts = [[p] for p in model.more] + [left]
    return [Descent([group(part, rate)]) for part, rate in zip(parts, rates, strict=True)]


def program(makes, changes=None):
    def trains(losses):
        model = Model()
        made = makes(model)
        for number in range(1, LAST + 1):
            x = batch(number)
            loss = F.mse_loss(model(x), x) + sum(p.square().sum() for p in getattr(model, "more", ()))
            loss.backward()
            losses.append(loss.item())
            if changes is not None and number in (5, 13):
                changes(made, number)
            for optimizer in made:
                optimizer.step()
            for optimizer in made:
                optimizer.zero_grad()

    return trains


class Refuses:
    """No number, by an error of its own."""

    def __float__(self):
        raise LookupError("no rate yet")


KINDS = {
    "alike": one(0.01, 0.01),
    "no rate": one(None, None),
    "the second has none": one(0.01, None),
    "whole": one(1, 0.01),
    "whole and alike": one(1, 1.0),
    "no number": one(math.nan, math.nan),
    "one is no number": one(math.nan, 0.01),
    "too large": one(10**400, 0.01),
    "refuses": one(0.01, Refuses()),
    "endless": one(math.inf, math.inf),
    "nought": one(0.0, -0.0),
    "tensors": one(torch.tensor(0.01), torch.tensor(0.02)),
    "a tensor twice": one(*[torch.tensor(0.01)] * 2),
    "a tensor and none": one(torch.tensor(0.01), None),
    "a tensor and a number": one(0.01, torch.tensor(0.01)),
    "groups": groups,
    "many": many,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rates_of_any_kind(tmp_path, kind):
    short_and_long(tmp_path, program(KINDS[kind]))


@pytest.mark.parametrize("rate", [10**400, Refuses(), len, "fast"], ids=["too large", "refuses", "function", "word"])
def test_what_is_no_number_is_no_rate_of_one_optimizer_either(tmp_path, rate):
    short_and_long(tmp_path, program(one(rate)))


@pytest.mark.parametrize("kind", ["alike", "groups", "tensors"])
def test_rates_that_a_schedule_changes(tmp_path, kind):
    def changes(made, number):
        for optimizer in made[number > 10 :]:  # both; later the second alone
            for each in optimizer.param_groups:
                each["lr"] = each["lr"] * 0.5

    short_and_long(tmp_path, program(KINDS[kind], changes))


def test_a_tensor_that_changes_in_place_is_kept_as_it_was(tmp_path):
    rates = torch.tensor(0.5), torch.tensor(0.25)

    def trains(losses):
        for rate, start in zip(rates, (0.5, 0.25), strict=True):
            rate.fill_(start)
        program(one(*rates), lambda made, number: rates[1].mul_(0.5))(losses)

    short_and_long(tmp_path, trains)
    _, _, writer = run(tmp_path, trains, "loss")
    known = writer.column("lr_1")
    assert [known[at] for at in (3, 6, 14)] == [0.25, 0.125, 0.0625]


def test_those_of_the_last_step_are_no_more_known(tmp_path):
    """A parameter group that was replaced, say by a checkpoint's: rates are of those that the step was made with."""

    def changes(made, number):
        state = made[1].state_dict()
        state["param_groups"][0]["lr"] = 0.07 / number
        made[1].load_state_dict(state)

    short_and_long(tmp_path, program(one(0.01, 0.02), changes))


@pytest.mark.parametrize("scalars", ["loss", "recorded", "all"])
@pytest.mark.parametrize(
    "rates", [[len], ["fast", 0.01], [len, len], [torch.tensor([0.1, 0.2])], [torch.tensor([0.1, 0.2]), 0.01]]
)
def test_what_is_no_number_is_none_of_a_row_and_nothing_of_the_program_s(tmp_path, rates, scalars):
    """A schedule's function, say, of an optimizer of the program's own; found where steps are left alone, or before."""

    def changes(made, number):
        for optimizer, rate in zip(made, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate

    for trains in (program(one(*rates)), program(one(*[0.02 for _ in rates]), changes)):
        alone = []
        trains(alone)
        losses, session, writer = run(tmp_path, trains, scalars)  # asks that nothing failed
        assert losses == alone
        assert session.facts()["steps"] == LAST
    if scalars != "recorded":
        known = writer.column("lr")
        assert [at for at in known if at >= 5] == ([*range(5, LAST + 1)] if isinstance(rates[-1], float) else [])


@pytest.mark.parametrize("rates", [(torch.tensor(0.01),), (torch.tensor(0.01), 0.01), (0.01, torch.tensor(0.01))])
def test_the_program_s_modes_see_nothing_of_tensors_that_are_kept(tmp_path, rates):
    def trains(losses):
        model = Model()
        made = one(*rates)(model)
        for number in range(1, LAST + 1):
            loss = F.mse_loss(model(batch(number)), batch(number))
            loss.backward()
            losses.append(loss.item())
            with Functions(seen):
                for optimizer in made:
                    optimizer.step()
            for optimizer in made:
                optimizer.zero_grad()

    seen = []
    trains([])
    alone, seen[:] = list(seen), []
    run(tmp_path, trains, "loss")
    assert seen == alone


def test_they_are_taken_by_the_shortcut(tmp_path):
    made, takes = [], Shortcut.take

    def counted(self, *args):
        takes(self, *args)
        made.append(self._now.taken and self._now.parts)

    for kind, makes in KINDS.items():
        made.clear()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Shortcut, "take", counted)
            run(tmp_path, program(makes), "loss")
        assert any(made), kind
