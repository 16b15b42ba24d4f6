"""What a reader says of a folder that is not a run, not whole, or not of its time."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from narrowgauge.errors import RunError
from narrowgauge.observe.store import RunWriter, compact, open_run


@pytest.fixture
def run_folder(tmp_path):
    """A run of three tensor segments (steps 0, 1, 2) of 1000 sites."""
    folder = tmp_path / "run"
    with RunWriter(folder, {"command": "train.py"}) as writer:
        for step in range(3):
            sites = [f"layers.{number}:input" for number in range(1000)]
            writer.add_tensors(step, sites, {"amax": np.random.default_rng(step).random(1000)})
            writer.add_scalars(step, loss=float(step))
            writer.flush()
    return folder


def segment(folder, index, kind="tensors"):
    return folder / kind / f"rank0-{index:08d}-{index:08d}.parquet"


def test_not_there(tmp_path):
    with pytest.raises(RunError, match=r"nowhere does not exist; expected the folder of a run"):
        open_run(tmp_path / "nowhere")


def test_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file is a file; expected the folder of a run"):
        open_run(tmp_path / "file")


def test_an_empty_folder(tmp_path):
    with pytest.raises(RunError, match=r"is empty, so it is not a run. Expected the folder of a run that was recorded"):
        open_run(tmp_path)


def test_another_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RunError, match=r"holds no run.json, so it is not a run"):
        open_run(tmp_path)
    with pytest.raises(RunError, match=r"holds no run.json, so it is not a run that could be compacted"):
        compact(tmp_path)


def test_a_folder_of_runs(tmp_path):
    for name in ("baseline", "noise"):
        RunWriter(tmp_path / name).close()
    with pytest.raises(RunError, match=r"is not a run but holds runs: baseline, noise. Open one of those"):
        open_run(tmp_path)


def test_segments_without_run_json(run_folder):
    (run_folder / "run.json").unlink()
    with pytest.raises(RunError, match=r"holds recorded segments but no run.json.*recover=True"):
        open_run(run_folder)
    run = open_run(run_folder, recover=True)
    assert (run.status, run.meta) == ("unknown", {})
    assert run.steps.tolist() == [0, 1, 2]


def test_nothing_is_lost_of_a_run_that_needs_no_recovery(run_folder):
    run, plain = open_run(run_folder, recover=True), open_run(run_folder)
    assert run.meta == plain.meta != {}
    assert run.status == plain.status == "complete"


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, '])
def test_half_a_run_json(run_folder, text):
    (run_folder / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run.json is not valid JSON .*repair it.*recover=True"):
        open_run(run_folder)


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("[]", "schema number"),
        ("{}", "schema number"),
        ('{"schema": "1"}', "schema number"),
        ('{"schema": 1}', "status"),
    ],
)
def test_the_run_json_of_something_else(run_folder, text, lacks):
    (run_folder / "run.json").write_text(text)
    with pytest.raises(RunError, match=rf"has no {lacks}, so it is not the run.json of a narrowgauge run"):
        open_run(run_folder)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"meta": None}, "meta is null; expected an object"),
        ({"meta": []}, "meta is a list; expected an object"),
        ({"lost": None}, "lost is null; expected an object"),
        ({"lost": {"tensors": "x"}}, "lost.tensors is 'x'; expected a whole number"),
        ({"status": 7}, "status is 7; expected a text"),
        ({"attempt": None}, "attempt is null; expected a whole number"),
        ({"process": "me"}, "process is 'me'; expected an object"),
    ],
)
def test_a_run_json_with_a_value_of_another_type(run_folder, facts, says):
    manifest = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps({**manifest, **facts}))
    with pytest.raises(RunError) as told:
        open_run(run_folder)
    assert f"run.json: {says}. It was damaged or edited by hand: repair it, or read" in str(told.value)
    assert open_run(run_folder, recover=True).steps.tolist() == [0, 1, 2]


def test_facts_are_whatever_their_writer_gave(tmp_path):
    facts = {"notes": "lr sweep 3", "models": ["gpt2"], "steps": 100.0, "watch": None, "seconds": "3 s"}
    with RunWriter(tmp_path / "own", facts) as writer:
        writer.add_scalars(1, loss=1.0)
    assert open_run(tmp_path / "own").meta == facts


def test_facts_that_are_not_known_or_that_nobody_reads(run_folder):
    manifest = json.loads((run_folder / "run.json").read_text())
    unknown = dict.fromkeys(("recipe", "flops", "ranks", "peak_memory_bytes", "seconds", "conversion", "not_found"))
    meta = {**unknown, "own": 7, "watch": {"update_share": None}}
    (run_folder / "run.json").write_text(json.dumps({**manifest, "ended": None, "process": None, "meta": meta}))
    assert open_run(run_folder).meta == meta


def test_a_newer_schema(run_folder):
    manifest = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps({**manifest, "schema": 7}))
    with pytest.raises(
        RunError,
        match=r"was written with run schema 7; this narrowgauge reads up to schema 1. "
        "Upgrade narrowgauge to a version that reads schema 7",
    ):
        open_run(run_folder)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def empty(file):
    file.write_bytes(b"")


def scramble(file):
    """The middle of the data is lost, the footer is whole: seen only when the pages are read."""
    content = bytearray(file.read_bytes())
    content[200:6000] = bytes(5800)
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, empty, scramble])
def test_a_damaged_segment_is_named_and_can_be_skipped(run_folder, damage):
    damage(segment(run_folder, 1))
    site = "layers.7:input"
    with pytest.raises(RunError) as caught:
        open_run(run_folder).series(site, "amax")
    assert "tensors/rank0-00000001-00000001.parquet cannot be read" in str(caught.value)
    assert "rank0-00000002" not in str(caught.value)
    assert "restore it, or go on without its rows by open_run(" in str(caught.value)
    assert "skip_corrupt=True" in str(caught.value)

    run = open_run(run_folder, skip_corrupt=True)
    with pytest.warns(UserWarning, match=r"going on without tensors/rank0-00000001-00000001.parquet"):
        steps, _ = run.series(site, "amax")
    assert steps.tolist() == [0, 2]
    assert run.tensors().rows == 2000  # and no second warning: warnings are errors here


def test_a_file_that_is_no_segment_is_told_as_one(run_folder):
    shutil.copy(segment(run_folder, 1, "scalars"), segment(run_folder, 1))
    why = (
        r"rank0-00000001-00000001.parquet cannot be read \(it is no segment of a run's tensors: it has no column site\)"
    )
    with pytest.raises(RunError, match=f"tensors/{why}"):
        open_run(run_folder).tensors()
    run = open_run(run_folder, skip_corrupt=True)
    with pytest.warns(
        UserWarning, match=r"going on without tensors/rank0-00000001-.*it is no segment of a run's tensors"
    ):
        assert run.tensors().rows == 2000


def test_a_damaged_segment_of_scalars_leaves_the_rest_readable(run_folder):
    cut(segment(run_folder, 0, "scalars"))
    run = open_run(run_folder, skip_corrupt=True)
    with pytest.warns(UserWarning, match=r"scalars/rank0-00000000-00000000.parquet"):
        assert run.scalars("loss")["step"].tolist() == [1, 2]
    assert run.tensors().rows == 3000


def test_all_segments_damaged(run_folder):
    for index in range(3):
        empty(segment(run_folder, index))
    with pytest.raises(RunError, match=r"rank0-00000000-00000000.parquet, tensors/rank0-00000001"):
        open_run(run_folder).tensors()
    run = open_run(run_folder, skip_corrupt=True)
    with pytest.warns(UserWarning, match=r"going on without"):
        assert run.tensors().rows == 0


@pytest.mark.parametrize(
    "question",
    [
        lambda run: run.tensors().rows,
        lambda run: run.tensors(columns=["amax"]).rows,
        lambda run: run.tensors(columns=["amax"], steps=[1]).rows,
        lambda run: run.series("layers.7:input", "amax")[0].size,
        lambda run: run.heatmap("amax")[1].size,
        lambda run: run.sql("SELECT count(amax) AS n FROM tensors")["n"][0],
    ],
)
def test_a_question_that_finds_the_only_segments_damaged_is_no_wrong_one(run_folder, question):
    """Their footers are whole, so that their metrics are known before a page of them is read."""
    for index in range(3):
        scramble(segment(run_folder, index))
    run = open_run(run_folder, skip_corrupt=True)
    with pytest.warns(UserWarning, match=r"going on without"):
        assert question(run) == 0
    assert question(run) == 0
    assert run.scalars("loss")["step"].tolist() == [0, 1, 2]


def test_a_metric_that_only_a_damaged_segment_has_is_empty(tmp_path):
    with RunWriter(tmp_path / "run", {}) as writer:
        for step, name in enumerate(["amax", "amin"]):
            for sites in range(0, 1000, 10):
                writer.add_tensors(step, [f"{n}:input" for n in range(sites, sites + 10)], {name: np.random.rand(10)})
            writer.flush()
    scramble(segment(tmp_path / "run", 1))
    run = open_run(tmp_path / "run", skip_corrupt=True)
    assert run.metrics == ("amax", "amin")
    with pytest.warns(UserWarning, match=r"going on without"):
        table = run.tensors(columns=run.metrics)
    assert (table.rows, np.isnan(table["amin"].astype(float)).all()) == (1000, True)


def test_a_damaged_run_is_not_compacted(run_folder):
    cut(segment(run_folder, 1))
    files = sorted(run_folder.rglob("*.parquet"))
    with pytest.raises(RunError, match=r"compacting .* failed .*The run is as readable as before"):
        compact(run_folder)
    assert sorted(run_folder.rglob("*.parquet")) == files


def test_foreign_and_half_written_files_are_not_read(run_folder):
    shutil.copy(segment(run_folder, 0), run_folder / "tensors" / "copy of rank0-00000000-00000000.parquet")
    (run_folder / "tensors" / ".rank0-00000003-00000003.parquet.123").write_bytes(b"PAR1")
    assert open_run(run_folder).tensors().rows == 3000
