"""What is clipped in step after step: by what is known of it a row is the same as where each gradient is looked for."""

import _thread
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import batch, nothing_is_compiled, run, told
from torch import nn
from torch.nn.utils import clip_grad_norm_

from narrowgauge.session.doors import clipped
from narrowgauge.session.doors.clipped import Clipped, with_gradients
from narrowgauge.session.steps import pace
from narrowgauge.session.steps.updates import Updates

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

SETTLED, RECORDED = 4, 10
EACH = range(1, 25)
LONG = [at for at in EACH if at <= SETTLED or at % RECORDED == 0]


@pytest.fixture(autouse=True)
def soon_settled(monkeypatch):
    """None is left alone, four settle that, and four parameters are many."""
    monkeypatch.setattr(pace, "SHORT", 0.0)
    monkeypatch.setattr(pace, "SETTLED", SETTLED)
    monkeypatch.setattr(clipped, "MANY", 4)


class Experts(nn.Module):
    """Of six layers those that a step asks for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x, chosen=range(6)):
        for number in chosen:
            x = x + torch.tanh(self.layers[number](x))
        return x

    def part(self, which):
        return [*self.layers[which].parameters()]


def trained(clip, *, before=lambda net, optimizer, number: None, chosen=lambda number: range(6), made=None):
    """A program that clips by `clip(net, number)`, and does what it has to `before` each step."""

    def program(losses):
        net = Experts()
        optimizer = (made or (lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)))(net)
        for number in EACH:
            before(net, optimizer, number)
            x = batch(number)
            loss = F.mse_loss(net(x, chosen(number)), x)
            loss.backward()
            losses.append(loss.item())
            clip(net, number)
            optimizer.step()
            optimizer.zero_grad()

    return program


def all_of_it(net, number=0):
    clip_grad_norm_(net.parameters(), 0.01)


def a_list(net, number):
    clip_grad_norm_([*net.parameters()], max_norm=0.01)


def the_largest(net, number):
    clip_grad_norm_(net.parameters(), 0.01, norm_type=torch.inf)


def a_part(net, number):
    clip_grad_norm_(net.part(slice(2)), 0.01)


def two_parts(net, number):
    clip_grad_norm_(net.part(slice(2)), 0.01)
    clip_grad_norm_(net.part(slice(2, 6)), 0.01)


def one_of_them_twice(net, number):
    all_of_it(net)
    clip_grad_norm_(net.part(slice(2)), 0.005)


def until_some_step(net, number):
    if number <= 13:
        all_of_it(net)


def another_part_from_some_step(net, number):
    clip_grad_norm_(net.part(slice(3) if number <= 13 else slice(3, 6)), 0.01)


def by_two_functions(net, number):
    """Of lists that are as long, of which the second has fewer gradients."""
    net.layers[5].zero_grad()
    total = torch.nn.utils.get_total_norm([p.grad for p in net.part(slice(2))])
    torch.nn.utils.clip_grads_with_norm_(net.part(slice(4, 6)), 0.01, total)


def with_one_given_after_it(net, number):
    net.layers[1].zero_grad()
    all_of_it(net)
    if number % 3 == 0:
        net.layers[1].bias.grad = torch.ones(16)


def with_one_taken_after_it(net, number):
    all_of_it(net)
    if number % 3 == 0:
        net.layers[1].zero_grad()


def with_more_in_it(net, number):
    """A list that is longer than what is trained, by what has no gradient, or has one in some steps."""
    more = [nn.Parameter(torch.ones(2)) for _ in range(40)]
    if number % 4 == 0:
        more[3].grad = torch.ones(2)
    clip_grad_norm_([*net.parameters(), *more], 0.01)


def frozen(net, optimizer, number):
    for p in net.part(slice(4)):
        p.requires_grad_(number > 13)


def the_other_half_frozen(net, optimizer, number):
    """As many are frozen in each step."""
    for half in (0, 1):
        for p in net.part(slice(3 * half, 3 * half + 3)):
            p.requires_grad_((number > 13) is bool(half))


def added(net, optimizer, number):
    if number == 14:
        optimizer.add_param_group({"params": net.part(slice(2, 6)), "lr": 0.1})


def replaced(net, optimizer, number):
    """In the optimizer's own list, which stays as long, by one that is not clipped."""
    if number == 14:
        optimizer.param_groups[0]["params"][3] = nn.Parameter(torch.ones(3))
    if number > 14:
        optimizer.param_groups[0]["params"][3].grad = torch.ones(3)


def reordered(net, optimizer, number):
    """The model's own layers, so that another has none of the step's tokens."""
    if number == 14:
        net.layers[0], net.layers[3] = net.layers[3], net.layers[0]


def of_two(net):
    return torch.optim.AdamW(net.part(slice(2)), lr=0.01)


def with_groups(net):
    return torch.optim.AdamW(
        [{"params": [p for p in net.parameters() if (p.dim() > 1) is matrix], "lr": 0.01} for matrix in (True, False)]
    )


def with_another_model(losses):
    """As many parameters beside the watched model's, clipped in the same step."""
    generator, other = Experts(), Experts()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, other)]
    for number in EACH:
        x = batch(number)
        for model, optimizer in zip((generator, other), optimizers, strict=True):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            losses.append(loss.item())
            if model is other or number % 4:
                all_of_it(model)
            optimizer.step()
            optimizer.zero_grad()


def few(number):
    return range(2)


def all_but_one(number):
    return [n for n in range(6) if n != 4]


def by_turns(number):
    return [n for n in range(6) if n != number % 6]


PROGRAMS = {
    "all": trained(all_of_it),
    "a list": trained(a_list),
    "largest": trained(the_largest),
    "a part": trained(a_part),
    "two parts": trained(two_parts),
    "twice": trained(one_of_them_twice),
    "until": trained(until_some_step),
    "another part": trained(another_part_from_some_step),
    "two functions": trained(by_two_functions),
    "given after": trained(with_one_given_after_it),
    "taken after": trained(with_one_taken_after_it),
    "more": trained(with_more_in_it),
    "frozen": trained(all_of_it, before=frozen),
    "halves": trained(all_of_it, before=the_other_half_frozen),
    "added": trained(all_of_it, before=added, made=of_two),
    "added, part": trained(a_part, before=added, made=of_two),
    "replaced": trained(all_of_it, before=replaced),
    "reordered": trained(all_of_it, before=reordered, chosen=all_but_one),
    "groups": trained(all_of_it, made=with_groups),
    "few": trained(all_of_it, chosen=few),
    "all but one": trained(all_of_it, chosen=all_but_one),
    "by turns": trained(all_of_it, chosen=by_turns),
    "another model": with_another_model,
}


@pytest.mark.parametrize("scalars", ["auto", "all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_as_where_each_gradient_is_looked_for(tmp_path, monkeypatch, name, scalars):
    known, asked = Clipped.with_gradients, []

    def compared(self, parameters, norm):
        of = known(self, parameters, norm)
        assert of == with_gradients(parameters)
        asked.append(len(of))
        return of

    monkeypatch.setattr(Clipped, "with_gradients", compared)
    losses, session, writer = run(tmp_path, PROGRAMS[name], scalars)
    monkeypatch.setattr(Updates, "settled", False)
    wanted_losses, wanted_session, wanted = run(tmp_path, PROGRAMS[name], scalars)
    assert losses == wanted_losses
    assert told(session, writer) == told(wanted_session, wanted)
    for column in ("lr_0", "lr_1", "data_digest", "nonfinite"):
        assert writer.column(column) == wanted.column(column)
    assert bool(asked) is (name != "two functions")


@pytest.mark.parametrize("name", ["all", "a list", "groups", "frozen", "few", "all but one"])
def test_no_gradients_are_read_again_that_are_known(tmp_path, monkeypatch, name):
    """In steps behind the first, and but the recorded ones."""
    looked, settled, recorded = [], [], []
    look, gradients = clipped._looked_at, with_gradients
    monkeypatch.setattr(clipped, "_looked_at", lambda *args: settled.append(1) or look(*args))
    monkeypatch.setattr(clipped, "with_gradients", lambda *args: looked.append(1) or gradients(*args))
    monkeypatch.setattr(
        "narrowgauge.session.doors.updating.with_gradients", lambda *args: recorded.append(1) or gradients(*args)
    )
    run(tmp_path, PROGRAMS[name], "auto")
    assert len(settled) == (2 if name == "frozen" else 1)
    assert len(recorded) == len(LONG)
    assert not looked


def test_what_is_kept_is_bounded_and_keeps_nothing_alive():
    known = Clipped()
    for _ in range(30):
        some = [nn.Parameter(torch.ones(1)) for _ in range(5)]
        for p in some[:3]:
            p.grad = torch.ones(1)
        held, norm = sys.getrefcount(some[0]), torch.ones(())
        for _ in range(2):
            known.norm_taken(norm, [p.grad for p in some[:3]])
            assert known.with_gradients(some, norm) == {*map(id, some[:3])}
        now = sys.getrefcount(some[0])
        assert now == held
        assert known._taken[0] is None
        assert len(known._known) <= clipped.LISTS


def test_what_went_between_the_norm_and_the_clip_is_not_kept():
    known, some, norm = Clipped(), [nn.Parameter(torch.ones(1)) for _ in range(5)], torch.ones(())
    for gone in (True, False):
        some[1].grad, some[2].grad = torch.ones(1), torch.ones(1)
        known.norm_taken(norm, [some[1].grad, some[2].grad])
        if gone:
            some[2].grad = None
        assert known.with_gradients(some, norm) == with_gradients(some)


def test_a_norm_that_another_thread_takes_meanwhile():
    known, some = Clipped(), [nn.Parameter(torch.ones(1)) for _ in range(5)]
    for norm in torch.ones(2):
        for p in some:
            p.grad = torch.ones(1)
        known.norm_taken(norm, [p.grad for p in some])
        assert known.with_gradients(some, norm) == with_gradients(some)
    some[0].grad = None
    known.norm_taken(torch.ones(()), [torch.ones(1)] * 5)
    assert known.with_gradients(some, norm) == with_gradients(some)


def test_a_norm_that_nothing_in_python_asks_for(tmp_path, monkeypatch):
    """A thread that is begun with torch's function has no caller whose code could be looked at."""
    failed, asked = [], []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)

    def program(losses):
        def clip(net, number):
            before = _thread._count()
            _thread.start_new_thread(torch.nn.utils.get_total_norm, ([p.grad for p in net.parameters()],))
            while _thread._count() > before:
                time.sleep(0.001)
            asked.append(number)

        trained(clip)(losses)

    run(tmp_path, program, "auto")
    assert len(asked) == len(EACH)
    assert not failed
