"""Ranges of steps."""

import pytest

from narrowgauge.session.selection.step_ranges import StepRanges, parse


@pytest.mark.parametrize(
    ("text", "span"), [("7", (7, 7)), (7, (7, 7)), ("0-100", (0, 100)), (" 5 - 9 ", (5, 9)), ("500-", (500, None))]
)
def test_a_range_is_read(text, span):
    assert parse(text) == span


@pytest.mark.parametrize("text", ["", "-5", "a", "1-2-3", "1.5", -1])
def test_what_is_no_range(text):
    with pytest.raises(ValueError, match="is no range of steps"):
        parse(text)


@pytest.mark.parametrize("text", [0, "0", "0-0"])
def test_steps_are_counted_from_1(text):
    with pytest.raises(ValueError, match=f"^{text!r} has no step: they are counted from 1$"):
        parse(text)


def test_steps_of_ranges():
    steps = StepRanges([[0, 2], [5, 5], [8, None]])
    assert [step for step in range(12) if step in steps] == [0, 1, 2, 5, 8, 9, 10, 11]
    assert 10**9 in StepRanges()
