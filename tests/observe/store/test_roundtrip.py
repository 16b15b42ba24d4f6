"""What is recorded comes back exactly: every value, every name, whatever the shapes of different steps."""

from __future__ import annotations

import json
import time
import types
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from narrowgauge.errors import RunError, ShapeError, UsageError
from narrowgauge.observe.store import Run, RunWriter, Table, open_run, role_of
from narrowgauge.observe.store import writer as store_writer

SITES = ["layers.0.up:input", "layers.0.up:weight", "layers.1.up:input"]


def recorded(path: Path, *steps: dict[str, object], sites: list[str] = SITES) -> Run:
    """A closed run whose step i recorded `steps[i]` for `sites`."""
    with RunWriter(path, {"command": "train.py"}) as writer:
        for step, columns in enumerate(steps):
            writer.add_tensors(step, sites, columns)
    return open_run(path)


@given(hnp.arrays(np.float32, 3), hnp.arrays(np.float64, 3), hnp.arrays(np.int64, 3))
@settings(max_examples=15, deadline=None)
def test_every_value_comes_back_bit_equal(tmp_path_factory, amax, mse, numel):
    run = recorded(tmp_path_factory.mktemp("run"), {"amax": amax, "mse": mse, "numel": numel})
    table = run.tensors()
    assert [*table["site"]] == sorted(SITES)
    for name, values in (("amax", amax), ("mse", mse), ("numel", numel)):
        assert table[name].dtype == values.dtype
        np.testing.assert_array_equal(table[name], values)  # NaN equals NaN: recorded as null, read as NaN


def test_extremes_of_float32_infinity_and_nan(tmp_path):
    tiny, huge = np.float32(1e-45), np.float32(3.4028235e38)
    run = recorded(tmp_path, {"a": np.array([tiny, huge, -np.inf], np.float32)}, {"a": np.array([np.nan] * 3)})
    assert run.series(SITES[0], "a")[1].tolist() == [float(tiny)]
    assert run.series(SITES[2], "a")[1].tolist() == [-np.inf]
    assert run.sql("SELECT count(*) AS n FROM tensors WHERE a IS NULL")["n"].tolist() == [3]


def test_steps_may_differ_in_sites_and_columns(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add_tensors(0, ["a:input"], {"amax": np.array([1.0]), "numel": np.array([16])})
        writer.add_tensors(0, ["a:output"], {"gemm_gain": np.array([1.5])})
        writer.add_tensors(1, ["b:input", "a:input"], {"amax": np.array([2.0, 3.0])})
        writer.add_tensors(2, [], {})
    run = open_run(tmp_path)
    assert run.metrics == ("amax", "numel", "gemm_gain")
    assert run.sites == ("a:input", "a:output", "b:input")
    assert run.steps.tolist() == [0, 1]
    table = run.tensors(["amax", "numel"])
    assert table.columns == ("step", "rank", "site", "amax", "numel")
    np.testing.assert_array_equal(table["amax"], [1, 3, np.nan, 2])
    np.testing.assert_array_equal(table["numel"], [16, np.nan, np.nan, np.nan])


def test_integers_keep_their_digits_beside_floats_of_the_same_name(tmp_path):
    big = 2**24 + 1  # not a float32
    with RunWriter(tmp_path) as writer:
        writer.add_tensors(0, ["a:input"], {"n": np.array([1.5], np.float32)})
        writer.flush()
        writer.add_tensors(1, ["a:input"], {"n": np.array([big])})
    assert open_run(tmp_path).series("a:input", "n")[1].tolist() == [1.5, big]


def test_histograms(tmp_path):
    counts = np.arange(12, dtype=np.uint32).reshape(3, 4)
    counts[0, 0] = 2**32 - 1
    run = recorded(tmp_path, {"exponent_histogram": counts, "other": counts.astype(np.int64) * 2**33})
    _steps, values = run.series(SITES[0], "exponent_histogram")
    assert values.shape == (1, 4)
    assert values[0].tolist() == counts[0].tolist()
    table = run.tensors(["other"], sites=SITES[1:2])
    assert table["other"][0].tolist() == (counts[1].astype(np.int64) * 2**33).tolist()


def test_masked_entries_are_null(tmp_path):
    numel = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    counts = np.ma.masked_array(np.ones((3, 2), np.int64), mask=[[False] * 2, [True] * 2, [False] * 2])
    table = recorded(tmp_path, {"numel": numel, "h": counts}).tensors()
    np.testing.assert_array_equal(table["numel"], [1, np.nan, 3])
    assert [None if h is None else h.tolist() for h in table["h"]] == [[1, 1], None, [1, 1]]


def test_any_characters_are_names_and_never_sql(tmp_path):
    names = ['we"ird', "x'; DROP TABLE tensors; --", 'a") , 1 AS (', "übel\n", "%s", "a.b", "min:amax", " "]
    sites = [*names, "it's:input"]
    run = recorded(tmp_path / "o'h \"[1]*", {name: np.arange(9.0) for name in names}, sites=sites)
    assert run.metrics == tuple(names)
    for name in names:
        for place, site in enumerate(sites):
            assert run.series(site, name)[1].tolist() == [place]
        assert run.heatmap(name)[0] == tuple(sorted(sites))
    with RunWriter(tmp_path / "b") as writer:
        writer.add_scalars(0, **dict.fromkeys(names, 1.0))
    scalars = open_run(tmp_path / "b").scalars()
    assert set(scalars.columns) == {"step", *names}
    assert open_run(tmp_path / "b").scalars(names[1])[names[1]].tolist() == [1.0]


def test_the_caller_may_overwrite_its_arrays(tmp_path):
    buffer = np.zeros(3)
    with RunWriter(tmp_path) as writer:
        for step in range(3):
            buffer[:] = step
            writer.add_tensors(step, SITES, {"amax": buffer})
    assert open_run(tmp_path).series(SITES[0], "amax")[1].tolist() == [0, 1, 2]


def test_scalars(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in range(4):
            writer.add_scalars(step, loss=1 / (step + 3), tokens=2**53 - step, eval_loss=2.0 if step == 3 else None)
        writer.add_scalars(4, loss=float("nan"))
    run = open_run(tmp_path)
    assert run.scalar_names == ("eval_loss", "loss", "tokens")
    table = run.scalars()
    assert table["loss"].tolist()[:4] == [1 / 3, 1 / 4, 1 / 5, 1 / 6]
    assert table["tokens"].tolist()[:4] == [2**53 - step for step in range(4)]
    assert np.isnan(table["loss"][4])
    assert run.scalars("eval_loss")["step"].tolist() == [3]
    assert run.scalars("loss").rows == 5  # a NaN loss is a recorded step


@pytest.mark.parametrize("flushed", [False, True])
def test_the_row_that_was_written_last_counts_whatever_the_clock_says(tmp_path, monkeypatch, flushed):
    clock = iter([5000.0, 5001.0, 2000.0, 2001.0, 2001.0])  # set back between a rank's own rows and what all ranks say
    monkeypatch.setattr(store_writer, "time", types.SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    with RunWriter(tmp_path / "run", {}) as writer:
        for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (1, 1.5), (2, 2.5)):
            writer.add_scalars(step, loss=loss)
            if flushed:
                writer.flush()
    run = open_run(tmp_path / "run")
    assert run.scalars("loss")["loss"].tolist() == [1.5, 2.5, 3.0]
    when = run.sql("SELECT step, min(wall_time) AS wall FROM scalars GROUP BY step ORDER BY step")["wall"]
    assert when.tolist() == [5000.0, 5001.0, 2000.0]  # new steps have the clock's time


def test_events(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add_event(7, "nan", "loss is NaN", site="a:input", count=3, where=Path("x"), worst=float("inf"))
        writer.add_event(2, "skipped", "it's skipped")
    events = open_run(tmp_path).events()
    assert events["kind"].tolist() == ["skipped", "nan"]
    assert events["site"].tolist() == [None, "a:input"]
    assert events["message"].tolist()[0] == "it's skipped"
    assert json.loads(events["data"][1]) == {"count": 3, "where": "x", "worst": "inf"}
    assert open_run(tmp_path).events("nan")["step"].tolist() == [7]


def test_run_json(tmp_path):
    writer = RunWriter(tmp_path, {"command": ["train.py", "--lr", 1e-3], "versions": {"numpy": np.float32(2.5)}})
    assert open_run(tmp_path).status == "running"
    writer.update_meta(data_hash="abc", command="other")
    writer.close("failed")
    run = open_run(tmp_path)
    assert run.meta == {"command": "other", "versions": {"numpy": 2.5}, "data_hash": "abc"}
    assert (run.status, run.reason, run.lost) == ("failed", "", {"tensors": 0, "scalars": 0, "events": 0})
    assert run.manifest["schema"] == 1
    assert run.manifest["started"] <= run.manifest["ended"]
    assert run.manifest["ended"].endswith("+00:00")


def test_an_empty_run_has_nothing_and_says_so(tmp_path):
    RunWriter(tmp_path).close()
    run = open_run(tmp_path)
    assert (run.sites, run.metrics, run.scalar_names, run.ranks) == ((), (), (), ())
    assert run.steps.tolist() == []
    assert run.tensors().rows == run.scalars().rows == run.events().rows == 0
    with pytest.raises(RunError, match=r"has no metric 'amax'; nothing was recorded"):
        run.series("a:input", "amax")


def test_ranks_have_their_own_files(tmp_path):
    for rank in (0, 1):
        with RunWriter(tmp_path, {"rank": rank}, rank=rank) as writer:
            writer.add_tensors(0, ["a:input"], {"amax": np.array([float(rank)])})
            writer.add_scalars(0, loss=float(rank))
    run = open_run(tmp_path)
    assert run.ranks == (0, 1)
    assert run.meta == {"rank": 0}
    assert [run.series("a:input", "amax", rank=rank)[1].tolist() for rank in (0, 1)] == [[0.0], [1.0]]
    assert run.tensors()["rank"].tolist() == [0, 1]
    assert run.scalars(rank=1)["loss"].tolist() == [1.0]


def test_segments_are_parquet_that_others_read_well(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in range(40):
            writer.add_tensors(step, SITES, {"amax": np.random.default_rng(step).random(3, np.float32)})
    (segment,) = (tmp_path / "tensors").iterdir()
    with duckdb.connect() as db:
        rows = db.execute(f"SELECT site, step FROM '{segment}'").fetchall()
        pages = db.execute(
            f"SELECT compression, encodings FROM parquet_metadata('{segment}') WHERE path_in_schema = 'amax'"
        ).fetchall()
    assert rows == sorted(rows)
    assert pages == [("ZSTD", "BYTE_STREAM_SPLIT")]


def test_selecting_rows(tmp_path):
    run = recorded(tmp_path, *({"amax": np.arange(3.0) + step} for step in range(5)))
    table = run.tensors(["amax"], sites=[SITES[1]], steps=[1, 3, 99])
    assert table["amax"].tolist() == [2.0, 4.0]
    assert table.row(0) == {"step": 1, "rank": 0, "site": SITES[1], "amax": 2.0}
    assert run.tensors("amax", SITES[1], 1).row(0) == table.row(0)  # and not the letters of a name
    assert repr(table) == "Table(2 rows: step, rank, site, amax)"
    with pytest.raises(RunError, match=r"has no metric 'amx'; did you mean 'amax'"):
        run.tensors(["amx"])
    with pytest.raises(RunError, match=r"has no site 'layers.0.up:inptu'; did you mean 'layers.0.up:input'"):
        run.series("layers.0.up:inptu", "amax")
    with pytest.raises(RunError, match=r"there is no column 'ammax'; did you mean 'amax'"):
        table["ammax"]
    with pytest.raises(RunError, match=r"the query on .* is wrong: Catalog Error"):
        run.sql("SELECT * FROM nothing")


def test_a_series_that_is_null_everywhere_is_empty(tmp_path):
    run = recorded(tmp_path, {"amax": np.array([1, np.nan, 2])})
    steps, values = run.series(SITES[1], "amax")
    assert len(steps) == len(values) == 0


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.zeros(2), r"column 'amax' has shape \(2,\); expected \[3\] or \[3, bins\]"),
        (np.zeros((3, 0)), r"column 'amax' has shape \(3, 0\)"),
        (np.zeros(()), r"column 'amax' has shape \(\)"),
        (np.array(["a"] * 3), "column 'amax' has dtype <U1; expected a float or integer dtype"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, column, message):
    with RunWriter(tmp_path) as writer, pytest.raises(ShapeError, match=message):
        writer.add_tensors(0, SITES, {"amax": column})


def test_reserved_column_and_unknown_status(tmp_path):
    with RunWriter(tmp_path) as writer:
        with pytest.raises(ShapeError, match=r"'step' is a key of every tensor row"):
            writer.add_tensors(0, SITES, {"step": np.zeros(3)})
        with pytest.raises(UsageError, match=r"status 'done' is unknown; there are: complete, failed, stopped"):
            writer.close("done")


def test_role_of():
    assert role_of("model.layers.0:weight") == "weight"
    assert role_of("loss") == ""


def test_table_is_a_mapping():
    table = Table({"a": np.array([1, 2]), "b": np.array(["x", None], object)})
    assert dict(table) == table
    assert len(table) == 2
    assert table.rows == 2
    assert "c" not in table


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(4, 30))
@settings(max_examples=100, deadline=None)
def test_thinning_keeps_every_stretch_extreme(values, points):
    from narrowgauge.observe.store.downsample import keep_extrema

    array = np.array(values, float)
    steps, kept = keep_extrema(np.arange(len(array)) * 3, array, points)
    assert len(steps) <= max(4, points)
    assert (array[steps // 3] == kept).all()
    assert {kept.min(), kept.max()} == {array.min(), array.max()}
    assert (steps[0], steps[-1]) == (0, 3 * (len(array) - 1))
