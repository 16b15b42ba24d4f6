"""Optimizers that take turns are all recorded, whatever the cadence meets."""

import pytest

from narrowgauge.session.selection.selection import Selection
from narrowgauge.session.selection.turns import MOST


def recorded(turns, every, steps=40, watch=None):
    """The recorded steps of a program whose step n is made by the optimizers of `turns[n - 1]`, round and round."""
    selection = Selection(watch or {}, every)
    found = []
    for step in range(1, steps + 1):
        if selection.due(step):
            found.append(step)
        selection.stepped(set(turns[(step - 1) % len(turns)]))
    return found


@pytest.mark.parametrize("turns", ["A", ["AB"], ["", "A"]])  # the last skips every other step
def test_where_all_step_together_nothing_is_added(turns):
    assert recorded(turns, 10) == [10, 20, 30, 40]


def test_each_has_a_step_that_is_recorded_with_the_one_before_it():
    assert recorded("CG", 10, 30) == [10, 11, 12, 20, 21, 22, 30]
    assert recorded("CG", 5, 20) == [5, 6, 7, 10, 11, 12, 15, 16, 17, 20]
    assert recorded("CCCG", 10, 20) == [10, 11, 12, 20]  # 12 is the generator's
    assert recorded("CG", 1, 6) == [1, 2, 3, 4, 5, 6]


def asked(turns, every, steps, watch=None):
    """The steps that all recipes look at, where nobody asked for them."""
    selection, found = Selection(watch or {}, every), []
    for step in range(1, steps + 1):
        selection.due(step)
        found += [step] * selection.seldom
        selection.stepped(set(turns[(step - 1) % len(turns)]))
    return found


def test_all_recipes_look_at_few_of_the_recorded_steps_and_at_the_first():
    assert asked("A", 10, 700) == [10, 40, 160, 640]
    assert asked("A", 1, 100) == [1, 4, 16, 64]
    assert asked("A", 10, 100, {"steps": [[25, 25], [30, 90]]}) == [25, 50]


def test_of_optimizers_that_take_turns_each_has_such_a_step():
    assert asked("CG", 10, 100) == [10, 11, 12, 40, 41, 42]
    assert asked("CG", 1, 20) == [1, 4, 5, 6, 16, 17, 18]


def test_one_that_has_stepped_once_is_waited_for_a_while():
    assert recorded("BBBBBBBA" + "B" * 32, 10) == [10, *range(11, 11 + MOST), 20, 30, 40]


def test_one_that_another_one_replaced_is_not_waited_for():
    assert recorded("A" * 8 + "B" * 32, 10) == [10, 20, 30, 40]
    assert recorded("A" * 12 + "B" * 28, 4) == [*range(4, 41, 4)]


def test_a_range_of_steps_is_not_left():
    assert recorded("CG", 10, watch={"steps": [[10, 11], [20, 20]]}) == [10, 11, 20]
