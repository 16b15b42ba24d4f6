"""What the shortcut makes of what a model is given, beside what the ordinary functions make of it, by chance."""

import random
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.models.alone import OfThread
from narrowgauge.session.shortcut.looks import MOST_MADE, Looks
from narrowgauge.session.shortcut.now import Now
from narrowgauge.session.steps import zeroed
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.references import References
from narrowgauge.session.tensors.batches import Batches

MODEL = 7


class Ordinary:
    """What hears of the calls of one program's model that is left alone."""

    def __init__(self, asks):
        self.batches, self.asks, self.thrown = Batches(), asks, 0
        self.rest = SimpleNamespace(refers=asks, keeps=True, on=True, line=Line(1, brief=True))
        self.evals = SimpleNamespace(unsure=None, reference_begins=int, reference_ended=lambda output: None)
        self.references = References(self.rest, self.evals, self.batches, lambda: self.rest.line.step - 1)
        self.references.rests(able=True)
        self.references.seen = asks

    @property
    def line(self):
        return self.rest.line

    def trains(self, inputs, output, tries):
        self.thrown += self.references.fed(self.line, inputs, MODEL, tries=tries)
        if self.asks:
            self.batches.made(output, inputs)

    def refers(self, inputs):
        return self.references.may_be(inputs)

    def backward(self):
        self.line.backwards += 1
        if self.line.backwards > 1 and zeroed.added(self.line):  # the first goes a way of its own
            self.thrown += zeroed.left(self.line, but=1)

    def zero(self):
        if zeroed.counted(self.line):
            self.line.zeroed = True

    def stepped(self):
        self.rest.line = Line(self.line.step + 1, brief=True)

    def told(self, called):
        line, batches = self.line, self.batches
        given = {key: version for key, (_, version, kept) in batches._before._by.items() if not kept.expired()}
        held = batches._last, batches._made
        last, made = ({at for at, kept in each.items() if not kept.expired()} for each in held)
        known = (given if self.asks else None, last) if called else ()  # or it is of the step before: nobody asks
        return self.thrown, line.elsewhere, line.zeroed, line.other_data, known, made


class Shortened(Ordinary):
    """The same, by the shortcut's looks for as long as they say that this is all."""

    def __init__(self, asks):
        super().__init__(asks)
        self.now, self.left = Now(), 0
        steps = SimpleNamespace(batches=self.batches, evals=self.evals, rest=SimpleNamespace(parted={}))
        self.hearing = Hearing()
        self.looks = Looks(self.now, self.hearing, steps, OfThread(), lambda owner: True)
        self.looks.begin(MODEL, None)
        self.take()

    def take(self):
        self.now.taken, self.now.looks, self.now.asks = True, True, self.asks

    def leave(self):
        now, line = self.now, self.line
        if not now.taken:
            return
        self.looks.tell()
        line.backwards, self.thrown = now.backwards, self.thrown + now.thrown
        line.elsewhere, line.zeroed, line.other_data = now.elsewhere, now.zeroed, now.other
        if now.met:
            self.references.called(line.step, now.backwards, waits=now.waits)
        now.taken = False
        now.forget()
        self.left += 1

    def trains(self, inputs, output, tries):
        self.now.tries = tries
        known = self.now.taken and self.looks.trains(inputs)
        if known and (not self.asks or self.looks.returned((*inputs, output))):
            self.now.tries = False
            return
        self.leave()
        super().trains(inputs, output, tries)

    def refers(self, inputs):
        if self.now.taken and self.now.waits:
            if self.looks.refers(SimpleNamespace(training=True), inputs):
                assert self.looks.returned((*inputs, torch.ones(2)))
                return True
            self.leave()
        return not self.now.taken and super().refers(inputs)

    def backward(self):
        now = self.now
        if not now.taken:
            super().backward()
            return
        if now.zeroed and now.other:
            now.throw()
        now.zeroed = now.other = now.waits = False
        now.backwards += 1

    def zero(self):
        if self.now.taken and not (self.now.backwards and self.looks.zeroed(None)):
            if not self.now.backwards:
                return
            self.leave()
        if not self.now.taken:
            super().zero()

    def stepped(self):
        thrown = self.now.thrown
        super().stepped()
        if self.now.taken:
            self.now.forget()
            self.now.thrown = thrown
        else:
            self.take()


class Program:
    """One by chance: what it gives its model, and gets."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.pool = [torch.ones(2, 3) for _ in range(4)]
        self.made = []

    def one(self):
        chance, kind = self.chance, self.chance.random()
        x = chance.choice(self.pool)
        if kind < 0.1 and self.made:
            return chance.choice(self.made)
        if kind < 0.2:
            return x[:1]
        if kind < 0.25:
            return torch.ones(2, requires_grad=True)
        return {4: torch.ones(2).to_sparse(), 5: [x], 6: None, 7: x.to("meta"), 8: 3}.get(chance.randrange(60), x)

    def inputs(self):
        given = [self.one() for _ in range(self.chance.choice((1, 1, 2)))]
        placed = self.chance.randrange(len(given) + 1)
        return tuple(given[:placed]), dict(zip("ab", given[placed:], strict=False))

    def output(self, inputs):
        passed = next((x for x in (*inputs[0], *inputs[1].values()) if type(x) is torch.Tensor), None)
        kind = self.chance.random()
        made = passed if kind < 0.1 and passed is not None else torch.ones(2)
        self.made = [*self.made, made][-2 * MOST_MADE :] if self.chance.random() < 0.99 else []
        return {"y": made} if kind > 0.9 else made.to_sparse() if 0.1 < kind < 0.15 else made

    def change(self):
        at = self.chance.randrange(len(self.pool))
        if self.chance.random() < 0.5:
            self.pool[at] = torch.ones(2, 3)
        else:
            self.pool[at].add_(1.0)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_the_looks_say_what_the_ordinary_functions_say(seed, asks):
    program, both = Program(seed), (Ordinary(asks), Shortened(asks))
    found = []
    for _ in range(60):
        inputs, called = program.inputs(), False
        for _ in range(program.chance.randrange(1, 9)):
            what = program.chance.choice(("trains", "trains", "again", "backward", "zero", "refers", "change"))
            inputs = inputs if what in ("again", "refers") and program.chance.random() < 0.8 else program.inputs()
            tries = called and program.chance.random() < 0.1
            if what in ("trains", "again"):
                output, called = program.output(inputs), True
                for each in both:
                    each.trains(inputs, output, tries)
            elif what == "refers" and asks:
                found.append([each.refers(inputs) for each in both])
                assert found[-1][0] == found[-1][1]
            elif what == "change":
                program.change()
            elif what != "refers" and called:
                for each in both:
                    getattr(each, what)()
        if program.chance.random() < 0.3:
            both[1].leave()
            assert both[0].told(called) == both[1].told(called)
        for each in both:
            each.stepped()
    both[1].leave()
    assert both[0].thrown == both[1].thrown
    assert not both[1].hearing.notes
    assert both[1].left > 5
    assert not asks or {True, False} == {each for each, _ in found}
