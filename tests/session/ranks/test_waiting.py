"""Rows that wait to be merged: added by the writer's thread, too, and taken by the program's, each once."""

import threading

import pytest

from narrowgauge.session.ranks.scalars import Waiting, rows_of

NAMES = ("loss", "lr")
ROWS = 20_000


@pytest.mark.parametrize("how", ["take", "rest"])
def test_each_row_is_taken_once_and_in_order_whoever_adds_it_meanwhile(how):
    waiting, found, over = Waiting(), [], threading.Event()

    def add():
        for step in range(1, ROWS + 1):
            while len(waiting._rows) > 1000:
                pass
            waiting.add(step, {"loss": float(step), "lr": 0.5})
        over.set()

    def taken():
        return rows_of(waiting.take(NAMES, 7), NAMES) if how == "take" else waiting.rest()

    adds = threading.Thread(target=add)
    adds.start()
    while not over.is_set() or waiting._rows:
        found += taken()
    adds.join()
    assert found == [(step, {"loss": float(step), "lr": 0.5}) for step in range(1, ROWS + 1)]


def test_what_is_held_back_is_told_before_any_is_taken():
    waiting = Waiting()
    waiting.tell = lambda: waiting.add(1, {"loss": 1.0})
    assert rows_of(waiting.take(NAMES, 3), NAMES) == [(1, {"loss": 1.0})]


def test_a_row_with_another_name_stays_the_first():
    waiting = Waiting()
    for step, name in ((1, "loss"), (2, "tokens"), (3, "loss")):
        waiting.add(step, {name: float(step)})
    assert rows_of(waiting.take(NAMES, 3), NAMES) == [(1, {"loss": 1.0})]
    assert [step for step, _ in waiting.rest()] == [2, 3]
