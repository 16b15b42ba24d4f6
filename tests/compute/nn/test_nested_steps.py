"""A step that calls its base class's is heard once: torch hooks both, once both classes have been used."""

import pytest
import torch
from torch import nn

from narrowgauge import convert
from narrowgauge.compute.nn.linear import clock_of
from narrowgauge.compute.nn.tracing.optimizer_steps import hear_steps


class Base(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


class Within(Base):
    """Steps as its base does, unless it is told to raise before that, or behind it; then the other steps."""

    fails, other = "", None

    @torch.no_grad()
    def step(self, closure=None):
        if self.fails == "before":
            raise KeyboardInterrupt
        super().step(closure)
        if self.fails == "behind":
            raise KeyboardInterrupt
        if self.other is not None:
            self.other.step()


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for kind in (torch.optim.SGD, Base):  # torch hooks a class's step when it makes the first of it
        kind(model.parameters(), lr=0.1)
    return model


@pytest.fixture
def heard():
    told = []
    stop = hear_steps(
        lambda optimizer, early: told.append(("ended", optimizer)),
        lambda optimizer, *_: told.append(("begins", optimizer)),
    )
    yield told
    stop()


@pytest.mark.parametrize("fails", ["", "before", "behind"])
def test_it_is_heard_once_also_behind_one_that_raised(model, heard, fails):
    optimizer = Within(model.parameters(), lr=0.1)
    for each in ("", fails, "", ""):
        optimizer.fails = each
        model(torch.ones(2, 16)).sum().backward()
        try:
            optimizer.step()
        except KeyboardInterrupt:
            heard.append(("raised", optimizer))
    second = "raised" if fails else "ended"
    assert [what for what, _ in heard] == ["begins", "ended", "begins", second, "begins", "ended", "begins", "ended"]


def test_what_another_optimizer_does_within_is_its_own(model, heard):
    optimizer, other = Within(model[0].parameters(), lr=0.1), Within(model[1].parameters(), lr=0.1)
    optimizer.other = other
    model(torch.ones(2, 16)).sum().backward()
    for _ in range(2):
        optimizer.step()
    assert heard == [("begins", optimizer), ("begins", other), ("ended", other), ("ended", optimizer)] * 2


def test_scales_that_wait_for_a_step_wait_for_one(model):
    convert(model, "delayed")
    optimizer = Within(model.parameters(), lr=0.1)
    for step in range(1, 4):
        model(torch.ones(16, 16)).sum().backward()
        optimizer.step()
        assert clock_of(model).step == step
