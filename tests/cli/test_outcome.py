"""What a run did not find is told at its end."""

import json

from narrowgauge.cli.outcome import not_found, unrecorded, what_came_of_it


def test_what_was_not_found_is_told_as_the_run_says_it(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"not_found": ["No loss was found."]}}))
    assert not_found(tmp_path) == ["No loss was found."]


def test_that_no_step_was_recorded_is_told_as_the_run_says_it(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"unrecorded": "No tensor was recorded."}}))
    assert unrecorded(tmp_path) == ["No tensor was recorded."]
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"unrecorded": ""}}))
    assert unrecorded(tmp_path) == []


def test_without_facts_nothing_is_told(tmp_path):
    assert not_found(tmp_path) == []
    (tmp_path / "run.json").write_text('{"meta": {}}')
    assert not_found(tmp_path) == []
    (tmp_path / "run.json").write_text("{")
    assert not_found(tmp_path) == []


def test_a_folder_that_was_removed_meanwhile_is_told_as_such(tmp_path):
    gone = tmp_path / "gone"
    assert what_came_of_it(gone, 0) == f"{gone} was removed while the command ran, and what was recorded with it."


def test_what_another_rank_found_is_not_told_as_missing(tmp_path):
    def rank(number, *missing):
        name = f"run.rank{number}.json" if number else "run.json"
        (tmp_path / name).write_text(json.dumps({"meta": {"not_found": missing}}))

    rank(0, "No model was found: none.", "No loss was found: backward was called on no scalar.")
    (tmp_path / "run.rank2.json").write_text('{"meta": {}}')  # it was killed
    rank(1, "No loss was found: backward was never called.", "No model was found: none.")
    assert len(not_found(tmp_path)) == 2
    rank(1, "No model was found: none.")  # the last stage of a pipeline has the loss
    assert not_found(tmp_path) == ["No model was found: none."]
