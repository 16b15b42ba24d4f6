"""`narrowgauge report` on what is damaged or newer: one message and exit code 2, or a page without the lost rows."""

import json
import os
import shutil
import subprocess
import sys
from html import unescape

import numpy as np
import pytest

from narrowgauge.cli.main import main
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.observe.verdict import Evidence, judge


@pytest.fixture
def folder(tmp_path):
    """A comparison's folder: a baseline, one variant, a verdict."""
    for name in ("baseline", "current"):
        with RunWriter(tmp_path / name, {"weights_hash": "w", "steps": 4}) as writer:
            for step in range(1, 5):
                writer.add_scalars(step, loss=2.0 / step)
    runs = {name: Evidence(name, open_run(tmp_path / name)) for name in ("baseline", "current")}
    verdict = judge(runs["baseline"], None, {"current": runs["current"]}, {})
    (tmp_path / "verdict.json").write_text(json.dumps(verdict.to_dict()))
    return tmp_path


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, argv)])
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"command": "tra', "it is no JSON"),
        ("\xff", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it has no schema number"),
        ("null", "it has no schema number"),
        ('{"schema": "one"}', "it has no schema number"),
        ('{"schema": 1}', "it has no 'variants'"),
        ('{"schema": 1, "variants": 3}', "a part of it is no part of a verdict"),
    ],
)
def test_a_damaged_verdict(folder, capsys, text, says):
    (folder / "verdict.json").write_text(text, encoding="latin-1")
    said = refused(capsys, folder)
    assert f"verdict.json cannot be read: {says}. Delete it" in said
    assert "Delete it to have a page of the runs alone" in said


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"watch": {"what_if": 7}}, "watch.what_if is 7; expected an object"),
        ({"watch": {"what_if": {"recipes": "r"}}}, "watch.what_if.recipes is 'r'; expected a list"),
        ({"conversion": [{}, True]}, "conversion.1 is true; expected an object"),
        ({"conversion": [{"calls": {}}]}, "conversion.0.calls is an object; expected a whole number"),
        ({"notes": "x" * 99}, f"notes is '{'x' * 39}...; expected a list"),
    ],
)
def test_facts_that_no_page_can_be_made_of(tmp_path, capsys, facts, says):
    with RunWriter(tmp_path / "run", facts) as writer:
        writer.add_scalars(1, loss=1.0)
    assert f"of the facts in its run.json, {says}. No page can be made of that" in refused(capsys, tmp_path / "run")


def test_a_newer_verdict(folder, capsys):
    data = json.loads((folder / "verdict.json").read_text())
    (folder / "verdict.json").write_text(json.dumps({**data, "schema": 9, "novelty": 1}))
    assert "has verdict schema 9; this narrowgauge reads up to schema 1" in refused(capsys, folder)


def test_a_newer_run(folder, capsys):
    manifest = json.loads((folder / "current" / "run.json").read_text())
    (folder / "current" / "run.json").write_text(json.dumps({**manifest, "schema": 9}))
    assert "run schema 9" in refused(capsys, folder)


def test_a_truncated_segment_is_named_and_the_rest_is_shown(folder, capsys):
    [segment] = (folder / "current" / "scalars").glob("*.parquet")
    segment.write_bytes(segment.read_bytes()[:100])
    main(["report", str(folder)])
    said = capsys.readouterr()
    assert "report.html" in said.out
    [line] = said.err.splitlines()
    assert f"going on without scalars/{segment.name}, which cannot be read" in line
    assert "SELECT" not in line


def test_the_worst_tensors_of_a_run_are_named_on_the_terminal(tmp_path, capsys):
    with RunWriter(tmp_path / "a", {"judged_by": "current"}) as writer:
        for step in (1, 2):
            writer.add_tensors(
                step, [f"{n}:input" for n in range(5)], {"sqnr_db": np.array([31.0, 12.0, 30.0, 29.0, 28.0])}
            )
    main(["report", str(tmp_path / "a")])
    *worst, page = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(": ")[0] for line in worst] == ["1:input", "4:input", "3:input"]
    assert "12.0 dB" in worst[0]
    assert page == f"The report: {tmp_path / 'a' / 'report.html'}"


def test_what_was_not_seen_is_told_beside_what_was(tmp_path, capsys):
    note = "Not seen as a weight in any recorded step: LSTM (2 of them, 94.2% of all parameters)."
    with RunWriter(tmp_path / "a", {"judged_by": "current", "notes": [note]}) as writer:
        writer.add_tensors(1, ["0:input"], {"sqnr_db": np.array([31.0])})
    main(["report", str(tmp_path / "a")])
    tensor, told, _ = capsys.readouterr().out.splitlines()
    assert tensor.startswith("a: 0:input: Healthy")
    assert told == f"a: note: {note}"


def test_where_nan_began_is_told_on_the_terminal_and_on_the_page(tmp_path, capsys):
    with RunWriter(tmp_path / "a", {"judged_by": "current"}) as writer:
        for step in range(1, 6):
            counted = {"sqnr_db": np.full(2, 31.0), "nan_count": np.array([step == 2, 0])}
            writer.add_scalars(step, loss=1.0, nonfinite=float(step == 2))
            writer.add_tensors(step, ["0:input", "1:input"], counted)
    main(["report", str(tmp_path / "a")])
    told = (
        "Step 2 is the first recorded one with NaN: in 0:input. Loss or gradient norm was first not finite there, too."
    )
    assert capsys.readouterr().out.splitlines()[0] == f"a: {told}"
    page = unescape((tmp_path / "a" / "report.html").read_text())
    assert f'<strong class="warn">Not finite.</strong> {told}</p>' in page
    main(["report", "--text", str(tmp_path / "a")])
    assert f"\nnot finite: {told}\n" in capsys.readouterr().out


def test_the_page_is_written_although_nobody_reads_the_terminal_to_its_end(folder):
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` leaves
    command = [sys.executable, "-m", "narrowgauge", "report", str(folder / "baseline")]
    told = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert "Traceback" not in told.stderr
    assert (folder / "baseline" / "report.html").is_file()


def test_of_a_run_without_tensors_it_is_said_how_far_it_came(folder, tmp_path, capsys):
    main(["report", str(folder / "baseline"), "-o", str(tmp_path / "a.html")])
    with RunWriter(tmp_path / "empty", {}):
        pass
    main(["report", str(tmp_path / "empty")])
    said = capsys.readouterr().out.splitlines()
    assert said[::2] == ["baseline: 4 steps, loss 2 to 0.5, no tensor to judge", "empty: 0 steps, no tensor to judge"]


def told(capsys, *argv):
    main(["report", *map(str, argv)])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize(
    ("status", "meta", "says"),
    [
        (None, {}, "run: killed; recorded: 2 steps, loss 3 to 1.5"),
        (
            "failed",
            {"error": "ValueError: boom"},
            "run: ended with an error: ValueError: boom; recorded: 2 steps, loss 3 to 1.5",
        ),
        ("stopped", {}, "run: the watch stopped early; recorded: 2 steps, loss 3 to 1.5"),
        ("complete", {}, ""),
    ],
)
def test_how_a_run_ended_is_told_unless_all_went_well(tmp_path, capsys, monkeypatch, status, meta, says, tensors):
    writer = RunWriter(tmp_path / "run", {"judged_by": "current", **meta})
    for step in (1, 2):
        writer.add_scalars(step, loss=3.0 / step)
        if tensors:
            writer.add_tensors(step, ["up:input"], {"sqnr_db": np.array([31.0])})
    if status:
        writer.close(status)
    else:
        writer.flush()
        monkeypatch.setattr("narrowgauge.observe.store.manifest.is_alive", lambda manifest: False)
    first, *rest = told(capsys, tmp_path / "run")
    assert (first == says) == bool(says)
    assert len(rest) == (2 if says else 1)
    assert ("no tensor to judge" in " ".join((first, *rest))) == (not tensors)
    if not status:
        monkeypatch.undo()
        writer.close()


def test_a_rank_that_recorded_nothing_is_named(tmp_path, capsys):
    RunWriter(
        tmp_path / "run", {"ranks": {"world": 2}, "not_found": ["No loss was found: the other may have it."]}
    ).close()
    assert told(capsys, tmp_path / "run")[:-1] == [
        "run: rank 1 of 2 recorded nothing here",
        "run: 0 steps, no tensor to judge",
    ]


def test_why_there_is_no_tensor_to_judge(tmp_path, capsys):
    why = {"unrecorded": "No tensor was recorded: why.", "not_found": ["No model was found: none."]}
    RunWriter(tmp_path / "run", why).close()
    assert told(capsys, tmp_path / "run")[:-1] == [
        "run: 0 steps, no tensor to judge",
        "run: No tensor was recorded: why.",
        "run: No model was found: none.",
    ]


def test_runs_inside_of_a_run_are_named_with_how_to_open_them(tmp_path, capsys):
    run = tmp_path / "run"
    for folder in (run, run / "process-20", run / "process-3", run / "restart-1", run / "what_if" / "rowwise"):
        RunWriter(folder, {}).close()
    for empty in ("process-4", "process-old"):  # nothing was recorded there
        (run / empty).mkdir()
    assert told(capsys, run)[1:] == [
        "run: 3 further runs are inside of this run's folder: process-3, process-20 and restart-1. To open them: "
        f"narrowgauge report {run}/process-3 {run}/process-20 {run}/restart-1",
        f"The report: {run / 'report.html'}",
    ]
    page = unescape((run / "report.html").read_text())
    assert "3 further runs are inside of this run's folder: process-3, process-20 and restart-1. To open them: " in page
    assert "narrowgauge report FOLDER/process-3 FOLDER/process-20 FOLDER/restart-1" in page


def test_of_many_runs_inside_some_are_named(tmp_path, capsys):
    for number in range(9):
        RunWriter(tmp_path / "run" / f"process-{number + 8}", {}).close()
    RunWriter(tmp_path / "run", {}).close()
    said = told(capsys, tmp_path / "run")[1]
    assert "9 further runs are inside of this run's folder: process-8, process-9, process-10 and 6 more." in said
    assert said.endswith(f"narrowgauge report {tmp_path}/run/process-*")


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, capsys, monkeypatch):
    for place in ("a/run", "b/run", "b/other"):
        with RunWriter(tmp_path / place, {"steps": 1}) as writer:
            writer.add_scalars(1, loss=2.0)
    monkeypatch.chdir(tmp_path / "a" / "run")
    main(["report", ".", "../../b/run", str(tmp_path / "a" / "run"), "../../b/other", "-o", "../../page.html"])
    said = capsys.readouterr().out
    assert [line.partition(": ")[0] for line in said.splitlines()] == ["a/run", "b/run", "other", "The report"]
    assert "<title>narrowgauge · a/run, b/run and other</title>" in (tmp_path / "page.html").read_text()
    main(["report", "."])
    assert capsys.readouterr().out.startswith("run: 1 step, ")


def test_a_run_beside_a_comparison_leaves_its_runs_their_names(folder, tmp_path, capsys):
    with RunWriter(folder / "before" / "current", {"steps": 1}) as writer:
        writer.add_scalars(1, loss=7.0)
    main(["report", "--text", str(folder), str(folder / "before" / "current")])
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert heads == ["# baseline", "# current", "# before/current"]


def test_two_comparisons_are_no_page(folder, tmp_path, capsys):
    shutil.copytree(folder, other := tmp_path / "other")
    assert "are two comparisons, and a page has one verdict. Make a page of each" in refused(capsys, folder, other)
    assert not (folder / "report.html").exists()
