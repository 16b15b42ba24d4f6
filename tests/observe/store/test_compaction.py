"""Merging changes no number, keeps every extreme, and may be interrupted anywhere."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.errors import RunError
from narrowgauge.observe.store import RunWriter, compact, compaction, manifest, open_run, reader, rollup
from narrowgauge.observe.store.schema import Segment, live

SITES = ["a:input", "a:weight", "b:input"]


def spiky(step: int) -> np.ndarray:
    """Noise, and one spike of one step in the whole run."""
    values = np.random.default_rng(step).random(3)
    values[1] = np.nan if step % 7 == 0 else values[1]
    return values if step != 4321 else np.array([1e9, -1e9, 0.5])


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """6000 steps in four segments, with a column that is not in all of them."""
    folder = tmp_path_factory.mktemp("long") / "run"
    with RunWriter(folder) as writer:
        for step in range(6000):
            writer.add_tensors(step, SITES, {"amax": spiky(step), "numel": np.full(3, 2**40 + step)})
            if step % 1000 == 0:
                writer.add_tensors(step, SITES[:1], {"h": np.full((1, 4), step, np.uint32)})
                writer.add_scalars(step, loss=float(step))
            if step % 2000 == 1999:
                writer.flush()
    return folder


@pytest.fixture
def copied(long_run, tmp_path, monkeypatch):
    monkeypatch.setattr(rollup, "ROLLUP_FROM", 6)
    return shutil.copytree(long_run, tmp_path / "run")


def everything(folder):
    run = open_run(folder)
    return [
        run.sql("SELECT * EXCLUDE h, h::VARCHAR AS h FROM tensors ORDER BY ALL"),
        run.scalars(),
        run.events(),
    ]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.columns == other.columns
        for name in one:
            if one[name].dtype == object:
                assert one[name].tolist() == other[name].tolist()
            else:
                np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("part_bytes", [1 << 30, 50_000])
def test_compaction_changes_nothing(copied, monkeypatch, part_bytes):
    monkeypatch.setattr(compaction, "PART_BYTES", part_bytes)
    before = everything(copied)
    done = compact(copied)
    parts = 1 if part_bytes > 1 << 20 else 3
    assert done.rows == 18_006 + 6
    assert done.files_after == 2 * parts + 1
    assert len(list((copied / "tensors").iterdir())) == parts
    assert_same(before, everything(copied))
    again = compact(copied)
    assert (again.files_before, again.files_after, again.rows) == (
        done.files_after,
        done.files_after,
        done.rows,
    )


@pytest.mark.parametrize("keep", ["extreme", "min", "max", "mean"])
@pytest.mark.parametrize("role", [None, "input"])
def test_a_roll_up_answers_like_the_rows(copied, monkeypatch, keep, role):
    compact(copied)
    run = open_run(copied)
    rolled = run.heatmap("amax", role, keep=keep)
    monkeypatch.setattr(run._source, "rollup", lambda rank: [])
    direct = run.heatmap("amax", role, keep=keep)
    assert rolled[0] == direct[0] == (("a:input", "b:input") if role else tuple(SITES))
    assert rolled[1].tolist() == direct[1].tolist() == list(range(0, 6000, 6))
    np.testing.assert_allclose(rolled[2], direct[2], rtol=1e-12)


def test_heatmaps_come_from_the_roll_up(copied):
    compact(copied)
    plans = []

    class Spy:
        def __init__(self, db):
            self.db = db

        def execute(self, query, *parameters):
            plans.append(query)
            return self.db.execute(query, *parameters)

    run = open_run(copied)
    ask = run._source.ask
    run._source.ask = lambda question: ask(lambda db: question(Spy(db)))
    run.heatmap("amax")
    assert "rollups/rank0-00000000-" in " ".join(plans)
    plans.clear()
    shutil.rmtree(copied / "rollups")
    run.heatmap("amax")
    assert "rollups" not in " ".join(plans)


def test_a_heatmap_of_histograms_is_refused(long_run):
    with pytest.raises(RunError, match=r"'h' is a histogram, which a heatmap can't show; read it by series\(site"):
        open_run(long_run).heatmap("h")


def test_one_spike_in_6000_steps_is_seen(long_run):
    _, steps, values = open_run(long_run).heatmap("amax")
    assert values.shape == (3, 1000)
    where = int(np.searchsorted(steps, 4321, side="right")) - 1
    assert values[:2, where].tolist() == [1e9, -1e9]
    steps, values = open_run(long_run).series("a:input", "amax", max_points=50)
    assert len(steps) <= 50
    assert (4321, 1e9) in zip(steps.tolist(), values.tolist(), strict=True)


def test_a_short_run_is_not_binned(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in (5, 10, 30):
            writer.add_tensors(step, ["a:input"], {"amax": np.array([step / 3])})
    compact(tmp_path)
    assert not list(tmp_path.glob("rollups/*"))
    sites, steps, values = open_run(tmp_path).heatmap("amax", "input")
    assert (sites, steps.tolist(), values.tolist()) == (("a:input",), [5, 10, 30], [[5 / 3, 10 / 3, 10.0]])
    assert open_run(tmp_path).heatmap("amax", "weight")[2].shape == (0, 0)


def test_a_roll_up_is_not_used_once_the_run_went_on(copied):
    compact(copied)
    with RunWriter(copied, resume=True) as writer:
        writer.add_tensors(6000, SITES, {"amax": np.array([7e9, 0, 0])})
    run = open_run(copied)
    assert run.heatmap("amax")[2].max() == 7e9
    compact(copied)
    assert run.heatmap("amax")[2].max() == 7e9
    assert run.series("a:input", "amax")[0].tolist() == list(range(6001))


def test_interrupted_before_the_inputs_are_removed(copied, monkeypatch):
    before = everything(copied)
    monkeypatch.setattr(compaction, "_sweep", lambda *_: None)
    compact(copied)
    assert len(list((copied / "tensors").iterdir())) == 4
    assert_same(before, everything(copied))


def test_interrupted_between_two_parts(copied, monkeypatch):
    before = everything(copied)
    monkeypatch.setattr(compaction, "PART_BYTES", 50_000)
    write, written = compaction.copy_aside, []

    def fail_at_third(db, select, target, *row_group):
        written.append(target)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        write(db, select, target, *row_group)

    monkeypatch.setattr(compaction, "copy_aside", fail_at_third)
    with pytest.raises(RunError, match=r"No space left on device.*The run is as readable as before"):
        compact(copied)
    assert_same(before, everything(copied))
    monkeypatch.undo()
    compact(copied)
    assert_same(before, everything(copied))
    assert len(list((copied / "tensors").iterdir())) == 1  # nothing is left of the first attempt


def test_a_run_in_progress_is_not_compacted(tmp_path):
    with RunWriter(tmp_path), pytest.raises(RunError, match=r"is still being written. Compact it when"):
        compact(tmp_path)


def test_a_run_that_another_host_may_be_writing(copied):
    claim = {**manifest.read(copied), "status": "running", "process": {"pid": 1, "host": "elsewhere"}}
    manifest.write(copied, claim)
    with pytest.raises(RunError, match=r"still being written on another host.*force=True if it was killed"):
        compact(copied)
    assert compact(copied, force=True).rows == 18_012


def test_no_roll_up_of_a_resumed_run(copied):
    with RunWriter(copied, resume=True) as writer:
        writer.add_tensors(4000, SITES, {"amax": np.zeros(3)})
    compact(copied)
    assert not list((copied / "rollups").glob("*"))
    assert open_run(copied).heatmap("amax")[2].max() < 1  # the spike of step 4321 was replaced


def test_the_writer_merges_small_segments_as_it_goes(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in range(40):
            writer.add_scalars(step, loss=float(step))
            writer.flush()
    names = sorted(path.name for path in (tmp_path / "scalars").iterdir())
    assert names[:2] == ["rank0-00000000-00000015.parquet", "rank0-00000016-00000031.parquet"]
    assert len(names) == 10
    assert open_run(tmp_path).scalars("loss")["loss"].tolist() == [float(step) for step in range(40)]


def test_a_reader_follows_a_run_whose_files_are_merged_under_it(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add_scalars(0, loss=0.0)
        writer.flush()
        run = open_run(tmp_path)
        assert run.scalars("loss").rows == 1
        for step in range(1, 33):
            writer.add_scalars(step, loss=float(step))
            writer.flush()
            assert run.scalars("loss").rows == step + 1


def test_files_that_vanish_between_listing_and_reading(copied, monkeypatch):
    run = open_run(copied)
    run.scalars()
    execute, vanished = reader.Source._refresh, []

    def refresh_then_lose(self):
        execute(self)
        if not vanished:
            vanished.append(True)
            compact(copied)

    monkeypatch.setattr(reader.Source, "_refresh", refresh_then_lose)
    assert run.sql("SELECT count(*) AS n FROM tensors")["n"].tolist() == [18_006]


def test_files_that_vanish_between_listing_and_opening(copied, monkeypatch):
    learn, vanished = reader.Source._learn_columns, []

    def lose_then_learn(self, kind, files):
        if not vanished:
            vanished.append(True)
            compact(copied)
        learn(self, kind, files)

    monkeypatch.setattr(reader.Source, "_learn_columns", lose_then_learn)
    assert open_run(copied).sql("SELECT count(*) AS n FROM tensors")["n"].tolist() == [18_006]


def test_half_a_compacted_span_is_not_read():
    small = [Segment(0, index, index) for index in range(4)]
    parts = [Segment(0, 0, 3, part, 3) for part in range(3)]
    assert live([*small, *parts[:2]]) == small
    assert live([*small, *parts]) == parts
    assert live([*parts, Segment(1, 0, 0), Segment(0, 4, 4)]) == [*parts, Segment(0, 4, 4), Segment(1, 0, 0)]


@given(st.integers(0, 9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 3), st.integers(1, 4))
def test_names_come_back(rank, first, last, part, parts):
    segment = Segment(rank, first, last, part if parts > 1 else 0, parts)
    assert Segment.parse(str(segment)) == segment


def test_other_names_are_not_segments():
    for name in (
        "x.parquet",
        ".rank0-00000000-00000000.parquet.1",
        "rank0-1-2.parquet.tmp",
        "xrank0-1-2.parquet",
    ):
        assert Segment.parse(name) is None
