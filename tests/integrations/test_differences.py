"""The comparison that all integrations rest on: each statistic, once wrong, is told."""

import pytest
import torch
from tests.integrations.by_hand import Sums
from tests.integrations.watched import TOLERANCES, differences, finished

KEY = (1, "0:input")


@pytest.fixture
def want():
    sums = Sums()
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) ** 7  # of wide range: some are flushed
    sums.add(x, torch.float8_e4m3fn)
    return finished(sums.row())


@pytest.mark.parametrize("name", [*TOLERANCES, "binades"])
def test_each_statistic_that_is_wrong_is_told(want, name):
    found = {**want, "share": 1.0}
    assert differences({KEY: found}, {KEY: want}) == []
    wrong = {**found["binades"], "0": 0} if name == "binades" else 1.02 * found[name] + 0.2
    told = differences({KEY: {**found, name: wrong}}, {KEY: want})
    assert len(told) == 1
    assert told[0].startswith(f"{KEY} {name}: ")


def test_rows_of_one_side_alone_are_told(want):
    assert differences({}, {KEY: want}) == [f"not seen: {KEY}"]
    assert differences({KEY: want}, {}) == [f"seen, and not there: {KEY}"]
