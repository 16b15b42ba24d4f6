"""What a run did not find is told at its end."""

import json

from narrowgauge.cli.run import not_found, what_came_of_it


def test_what_was_not_found_is_told_as_the_run_says_it(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"not_found": ["No loss was found."]}}))
    assert not_found(tmp_path) == ["No loss was found."]


def test_without_facts_nothing_is_told(tmp_path):
    assert not_found(tmp_path) == []
    (tmp_path / "run.json").write_text('{"meta": {}}')
    assert not_found(tmp_path) == []
    (tmp_path / "run.json").write_text("{")
    assert not_found(tmp_path) == []


def test_a_folder_that_was_removed_meanwhile_is_told_as_such(tmp_path):
    gone = tmp_path / "gone"
    assert what_came_of_it(gone, 0) == f"{gone} was removed while the command ran, and what was recorded with it."
