"""What is asked of a run in another kind is taken where it is plain what is meant, else refused in a sentence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from narrowgauge.errors import RunError, UsageError
from narrowgauge.observe.store import Run, RunWriter, open_run

SITES = ["a:input", "a:weight"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with RunWriter(folder) as writer:
        for step in range(6):
            writer.add_tensors(step, SITES, {"amax": np.array([step, 0.5])})
            writer.add_scalars(step, loss=float(step), **({"lr": 0.1} if step % 2 else {}))
        writer.add_event(2, "nan", "the loss is not finite")
        writer.add_event(3, "skipped", "a step was skipped")
    return open_run(folder)


def test_several_names_are_taken_where_one_is(run):
    table = run.scalars(["lr", "loss"])
    assert (table.columns, table.rows) == (("step", "lr", "loss"), 6)
    assert np.isnan(table["lr"]).tolist() == [True, False] * 3
    assert run.scalars(np.array(["lr"]))["step"].tolist() == run.scalars("lr")["step"].tolist() == [1, 3, 5]
    assert run.scalars([]).rows == 0
    assert run.events({"nan", "skipped"}).rows == 2
    assert run.tensors(["amax", "amax"]).columns == ("step", "rank", "site", "amax")
    assert run.tensors(sites=np.array(SITES[:1])).rows == 6


def test_names_that_differ_in_case_are_two(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add_scalars(0, loss=1.0, Loss=2.0)
    table = open_run(tmp_path).scalars(["loss", "Loss"])
    assert table.row(0) == {"step": 0, "loss": 1.0, "Loss": 2.0}


@pytest.mark.parametrize("steps", [3, 3.0, np.int64(3), [3], np.array([3]), np.array([3.0]), range(3, 4), {3}])
def test_whole_numbers_of_any_kind(run, steps):
    assert run.tensors(steps=steps)["step"].tolist() == [3, 3]
    assert run.scalars("loss", rank=np.int64(0)).rows == 6
    assert len(run.series("a:input", "amax", max_points=1e4)[0]) == 6
    assert run.scalars().row(np.int64(-1))["loss"] == 5.0


def test_parameters_of_a_query_by_name_and_as_numpy_has_them(run):
    step = run.scalars("loss")["step"][2]
    query = "SELECT count(*) AS rows FROM tensors WHERE step < "
    assert run.sql(query + "?", [step])["rows"].tolist() == [4]
    assert run.sql(query + "$last", {"last": step})["rows"].tolist() == [4]
    assert run.sql(query + "?", (2,))["rows"].tolist() == [4]


NAME = "expected one name, such as"
SEVERAL = "or a list of names."
NUMBER = "expected a whole number from"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: run.scalars(3), f"name is 3 (int); expected a name, such as 'loss', {SEVERAL}"),
        (lambda run: run.scalars(["loss", 3]), f"one of name is 3 (int); {NAME} 'loss'."),
        (lambda run: run.scalars("loss", rank="0"), f"rank is '0' (str); {NUMBER} 0 on."),
        (lambda run: run.scalars("loss", rank=True), f"rank is True (bool); {NUMBER} 0 on."),
        (lambda run: run.events(3), f"kind is 3 (int); expected a name, such as 'nan', {SEVERAL}"),
        (lambda run: run.tensors(3), f"columns is 3 (int); expected a name, such as 'amax', {SEVERAL}"),
        (lambda run: run.tensors(sites=[3]), f"one of sites is 3 (int); {NAME} 'layers.0.mlp.up:input'."),
        (lambda run: run.tensors(steps="12"), f"one of steps is '12' (str); {NUMBER} 0 on."),
        (lambda run: run.tensors(steps=[1, 1.5]), f"one of steps is 1.5 (float); {NUMBER} 0 on."),
        (
            lambda run: run.tensors(steps=slice(3)),
            "steps is slice(None, 3, None) (slice); expected a whole number, or ",
        ),
        (lambda run: run.series(["a:input"], "amax"), f"site is ['a:input'] (list); {NAME} 'layers.0.mlp.up:input'."),
        (lambda run: run.series("a:input", None), f"metric is None (NoneType); {NAME} 'amax'."),
        (lambda run: run.series("a:input", "amax", max_points=0), f"max_points is 0 (int); {NUMBER} 1 on."),
        (lambda run: run.heatmap(["amax"]), f"metric is ['amax'] (list); {NAME} 'amax'."),
        (lambda run: run.heatmap("amax", ["input"]), f"role is ['input'] (list); {NAME} 'input'."),
        (lambda run: run.heatmap("amax", max_steps=4.5), f"max_steps is 4.5 (float); {NUMBER} 1 on."),
        (lambda run: run.heatmap("amax", keep=["max"]), "keep is ['max'] (list); expected one of extreme, min, max, m"),
        (lambda run: run.heatmap("amax", keep="maxi"), "there is no keep 'maxi'; did you mean 'max'?"),
        (lambda run: run.sql(3), "query is 3 (int); expected SQL, such as 'SELECT max(amax) FROM tensors'."),
        (lambda run: run.sql("-- nothing"), "the query is empty; expected SQL, such as 'SELECT max(amax) FROM tensors"),
        (lambda run: run.sql("SELECT ?", 5), "parameters is 5 (int); expected a list of values, one for each ? of the"),
        (lambda run: run.sql("SELECT ?", "ab"), "parameters is 'ab' (str); expected a list of values, one for each ?"),
        (
            lambda run: run.scalars()[["loss"]],
            "the column is ['loss'] (list); expected one name of step, loss, lr; row(",
        ),
        (lambda run: run.scalars().row("loss"), f"index is 'loss' (str); {NUMBER} -6 on."),
        (lambda run: open_run([run.path]), "open_run takes the path of one run's folder; found list."),
        (lambda run: open_run(None), "open_run takes the path of one run's folder; found NoneType."),
    ],
)
def test_a_wrong_kind_is_refused_in_a_sentence(run, ask: Callable[[Run], Any], said: str):
    with pytest.raises(UsageError, match=re.escape(said)):
        ask(run)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: run.scalars("los"), "has no scalar 'los'; did you mean 'loss'?"),
        (lambda run: run.scalars(["loss", "tokens"]), "has no scalar 'tokens'; there are: loss, lr."),
        (lambda run: run.scalars("step"), "has no scalar 'step'; there are: loss, lr."),
        (lambda run: run.scalars("loss", rank=7), "has no rank 7; there is only: 0."),
        (lambda run: run.series("a:input", "amax", rank=7), "has no rank 7; there is only: 0."),
        (lambda run: run.heatmap("amax", rank=7), "has no rank 7; there is only: 0."),
        (lambda run: run.heatmap("amax", "inputs"), "has no role 'inputs'; did you mean 'input'?"),
        (lambda run: run.tensors(sites=["a:input", "a:wieght"]), "has no site 'a:wieght'; did you mean 'a:weight'?"),
        (lambda run: run.scalars().row(6), "there is no row 6: the table has 6, counted from 0."),
    ],
)
def test_what_the_run_does_not_have_is_named(run, ask: Callable[[Run], Any], said: str):
    with pytest.raises(RunError, match=re.escape(said)):
        ask(run)


def test_what_is_known_and_has_no_rows_is_empty(run):
    assert run.events("model_changed").rows == 0  # good news
    assert run.tensors(sites="a:weight", steps=99).rows == 0
    assert run.heatmap("amax", "grad_output")[0] == ()


def test_a_run_that_has_recorded_nothing_yet_has_no_rows(tmp_path):
    """Whoever follows a run from its beginning asks for what comes."""
    with RunWriter(tmp_path):
        run = open_run(tmp_path)
        assert run.scalars("loss").columns == ("step", "loss")
        assert run.scalars("loss", rank=0).rows == run.tensors(sites="a:input").rows == 0


def test_a_table_is_asked_like_a_dict(run):
    table = run.scalars()
    assert table.get("los") is None
    assert table.get("los", 1) == 1
    assert table.get("loss") is table["loss"]
    assert ["loss"] not in table


def test_what_only_another_rank_recorded(tmp_path):
    """Not the words of the database that this rank has no such column."""
    for rank in (0, 1):
        with RunWriter(tmp_path, rank=rank) as writer:
            writer.add_scalars(0, **{f"of_{rank}": 1.0})
            if rank:
                writer.add_tensors(0, SITES, {"amax": np.array([1.0, 2.0])})
    run = open_run(tmp_path)
    assert [len(found) for found in run.series("a:input", "amax")] == [0, 0]
    assert run.series("a:input", "amax", rank=1)[1].tolist() == [1.0]
    assert run.heatmap("amax", rank=0)[0] == ()
    assert run.scalars("of_1").rows == 0
    assert run.scalars("of_1", rank=1).rows == 1


def test_no_wrong_kind_meets_anything_else(run):
    for given in (3, 1.5, None, b"loss", object(), {"a": {1}}, slice(2), [["loss"]], np.zeros((2, 2))):
        for ask in (
            *(lambda x: run.scalars(x), lambda x: run.scalars("loss", rank=x), lambda x: run.events(x)),
            *(lambda x: run.tensors(x), lambda x: run.tensors(sites=x), lambda x: run.tensors(steps=x)),
            *(lambda x: run.series(x, "amax"), lambda x: run.series("a:input", x), lambda x: run.heatmap(x)),
            *(lambda x: run.heatmap("amax", x), lambda x: run.heatmap("amax", keep=x), lambda x: run.sql(x)),
            *(lambda x: run.heatmap("amax", max_steps=x), lambda x: run.sql("SELECT 1 WHERE ?", x)),
            *(lambda x: run.scalars()[x], lambda x: run.scalars().row(x), lambda x: open_run(x)),
        ):
            with suppress(UsageError, RunError):
                ask(given)


def test_a_folder_that_was_moved_away_is_told_and_has_no_empty_answer(run: Run, tmp_path, monkeypatch):
    here = open_run(shutil.copytree(run.path, tmp_path / "here"))
    moved = here.path.rename(tmp_path / "moved")
    for ask in (lambda: here.scalars("loss"), lambda: here.steps, here.tensors, lambda: here.scalar_names):
        with pytest.raises(RunError, match=r"is no longer there: it was moved or deleted, or the working directory"):
            ask()
    monkeypatch.chdir(tmp_path)
    beside = open_run("moved")
    monkeypatch.chdir("/")
    with pytest.raises(RunError, match=r"moved is no longer there"):
        beside.scalars("loss")
    assert open_run(moved).scalars("loss")["loss"].size
