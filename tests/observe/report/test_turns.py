"""A program that trains in turns: a line of its loss for each, and layers without holes."""

import numpy as np
import pytest

from narrowgauge.cli.main import main
from narrowgauge.observe import figures
from narrowgauge.observe.report import gather, html
from narrowgauge.observe.report.single import single
from narrowgauge.observe.report.steps import turns
from narrowgauge.observe.store import RunWriter, Table, open_run

LOSSES = [5.0, 1.0, 4.5, 0.9, 4.0, 0.8, 3.5, 0.7]


def table(**columns):
    return Table({name: np.asarray(values, float) for name, values in columns.items()})


@pytest.fixture
def adversarial(tmp_path):
    """A run of two optimizers in turns; of its first step nobody knew yet that there would be another's."""
    with RunWriter(tmp_path / "run", {}) as writer:
        for step, loss in enumerate(LOSSES, start=1):
            first = step % 2
            own = {"lr": 0.1 if first else 0.4, "tokens": 8.0 if first else 256.0}
            writer.add_scalars(step, loss=loss, grad_norm=loss / 10, microbatches=1.0, **own)
            if step > 1:
                writer.add_scalars(step, turn=float((step + 1) % 2))
    return tmp_path / "run"


def test_each_turn_has_its_own_rows():
    found = turns(table(step=[1, 2, 3, 4, 5], loss=[5, 1, 4, 1, 3], turn=[np.nan, 1, 0, 1, 0]))
    assert [name for name, _ in found] == ["turn 0", "turn 1"]  # as the scalars have them
    assert [rows.tolist() for _, rows in found] == [[True, False, True, False, True], [False, True, False, True, False]]


def test_what_has_no_number_or_never_comes_again_is_one_beside_turns():
    nan = np.nan
    turn = [nan, nan, 1, 2, 1, 2, nan, 1, 3]  # one alone, two in turns, one too many, another that comes once
    (others, rest), (one, first), (two, second) = turns(table(step=range(9), loss=[1] * 9, turn=turn))
    assert (others, one, two) == ("other turns", "turn 1", "turn 2")
    assert np.flatnonzero(rest).tolist() == [0, 1, 6, 8]
    assert np.flatnonzero(first).tolist() == [2, 4, 7]
    assert np.flatnonzero(second).tolist() == [3, 5]


@pytest.mark.parametrize(
    "turn",
    [
        None,
        [np.nan, np.nan, 1, 1, 1],
        [np.nan, np.nan, 1, 2, np.nan],
        [np.nan, 1, 1, np.nan, np.nan],
        [np.nan, 1, np.nan, 1, 1],
    ],
    ids=[
        "one optimizer",
        "one after the other",
        "more than have numbers",
        "more, and each takes its time",
        "a skipped step",
    ],
)
def test_all_else_is_one(turn):
    columns = {"step": [1, 2, 3, 4, 5], "loss": [5, 4, 3, 2, 1]} | ({} if turn is None else {"turn": turn})
    ((name, everything),) = turns(table(**columns))
    assert everything.all()
    assert not name


def test_the_loss_has_a_line_for_each_turn_and_none_has_ended(adversarial):
    run = open_run(adversarial)
    first, second = gather.by_turn(run, gather.trace("run", run, "#0072b2"))
    assert (first.name, second.name) == ("run, turn 0", "run, turn 1")
    assert first.values.tolist() == LOSSES[::2]
    assert second.values.tolist() == LOSSES[1::2]
    assert second.steps.tolist() == [2, 4, 6, 8]
    labels = [r.text for r in figures.loss_curves([first, second]).center if hasattr(r, "text")]
    assert labels == ["run, turn 0", "run, turn 1"]


def test_a_run_that_stopped_before_the_other_is_still_told_as_ended():
    short, long = (figures.Trace(str(n), "#0072b2", np.arange(1.0, n + 1), np.ones(n)) for n in (6, 7))
    labels = [r.text for r in figures.loss_curves([short, long]).center if hasattr(r, "text")]
    assert labels == ["6 (ended)", "7"]


def test_numbers_of_each_turn_stand_side_by_side(adversarial, tmp_path, capsys):
    run = open_run(adversarial)
    (told,) = single({"run": run})
    assert (told["loss"], told["grad_norm"]) == ("3.5000 and 0.7000", "0.35 and 0.07")
    assert (told["lr"], told["tokens"]) == ("0.1 and 0.4", "8 and 256")
    page = html(None, {"run": run}, tmp_path / "page.html").read_text()
    assert "8 steps, loss 3.5000 and 0.7000" in page
    main(["report", str(adversarial)])
    assert "8 steps, loss 5 to 3.5 and 1 to 0.7" in capsys.readouterr().out


def test_a_layer_of_every_second_recorded_step_keeps_its_value_until_the_next():
    nan = np.nan
    grid = np.array(
        [[1, nan, 2, nan, 3, nan], [nan, 1, nan, 2, nan, nan], [1, 2, nan, 4, 5, 6], [nan] * 6, [nan, 1] + [nan] * 4]
    )
    held = np.array(
        [[1, 1, 2, 2, 3, nan], [nan, 1, 1, 2, nan, nan], [1, 2, nan, 4, 5, 6], [nan] * 6, [nan, 1] + [nan] * 4]
    )
    np.testing.assert_array_equal(gather._held(grid), held)
    rare = np.array([[1, nan, 2, nan, 3, nan, nan, nan, nan, nan, 4, nan]])
    assert np.isnan(gather._held(rare)[0, 5:10]).all()  # longer than usual: it was not there


def test_a_tensor_recorded_between_gaps_has_a_line_and_a_dot():
    scales = np.full((2, 5), np.nan, np.float32)
    scales[0, [0, 2, 4]], scales[1, 1] = 2.0, 4.0
    picture = figures.scale_traces(
        {"run": scales},
        np.arange(1.0, 6.0),
        ["one", "two"],
        colors={"run": "#0072b2"},
        named={"run": ["one", "two"]},
        shown="run",
    )
    lines = next(r.data_source.data for r in picture.renderers if "xs" in r.data_source.data)
    assert [list(x) for x in lines["xs"]] == [[1, 3, 5], [2]]
    assert [list(y) for y in lines["ys"]] == [[1, 1, 1], [2]]
    assert list(lines["end_y"]) == [1, 2]
    assert sum(r.glyph.__class__.__name__ == "Scatter" for r in picture.renderers) == 1
