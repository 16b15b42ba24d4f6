"""Rows that arrive as packed moments, beside rows whose metrics were made at once."""

import numpy as np
import pytest

from narrowgauge.metrics import MOMENTS, OPERAND_COLUMNS, RESULT_COLUMNS, finalize
from narrowgauge.observe.store import RunWriter, moments, open_run


def tables(steps, sites, width):
    rng = np.random.default_rng(0)
    for step in steps:
        table = np.floor(rng.gamma(1.0, 50.0, (sites, width)))
        table[step % sites] = MOMENTS.empty()[:width]  # a site of which nothing is known: its metrics are null
        yield step, table


@pytest.mark.parametrize(("columns", "width"), [(OPERAND_COLUMNS, MOMENTS.width), (RESULT_COLUMNS, MOMENTS.head_width)])
@pytest.mark.parametrize("together", [1, 7, 1000])
def test_metrics_are_the_same_whoever_makes_them_and_of_how_many_steps_at_once(
    tmp_path, monkeypatch, columns, width, together
):
    monkeypatch.setattr(moments, "ROWS", together)
    names = [f"layer{i}:input" for i in range(3)]
    further = {"ranks": np.array([1, 2, 2])}
    with RunWriter(tmp_path / "later", {}) as later, RunWriter(tmp_path / "at_once", {}) as at_once:
        for step, table in tables(range(6), 3, width):
            later.add_moments(step, names, table, columns, further)
            at_once.add_tensors(step, names, finalize(table, columns=columns) | further)
    found, want = (open_run(tmp_path / name) for name in ("later", "at_once"))
    assert found.metrics == want.metrics
    found, want = found.tensors(), want.tensors()
    assert len(found["step"]) == 18
    for name in ("step", "site", *columns, "ranks"):
        np.testing.assert_array_equal(np.stack(found[name]), np.stack(want[name]))
