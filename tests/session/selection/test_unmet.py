"""What was asked in vain is told once, and of a glob only if no rank had it."""

import json

from narrowgauge.session.selection.unmet import unmet


def write(folder, rank, *told):
    name = "run.json" if rank == 0 else f"run.rank{rank}.json"
    (folder / name).write_text(json.dumps({"meta": {"unmet": list(told)}}))


def test_a_glob_that_some_rank_has_is_not_told(tmp_path):
    text = "watch.sites: {!r} matched nothing in this program; there is only: {!r}."
    write(tmp_path, 0, text.format("late", "early"), text.format("fc9", "early"))
    write(tmp_path, 1, text.format("fc9", "late"), "dump[0]: its cap of 1 KiB was reached at step 2: ...")
    assert unmet(tmp_path) == [
        "watch.sites: 'fc9' matched nothing in this program; there is only: 'early'.",
        "dump[0]: its cap of 1 KiB was reached at step 2: ...",
    ]


def test_a_run_without_facts(tmp_path):
    assert unmet(tmp_path) == []
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "run.rank1.json").write_text('{"meta": {}}')
    assert unmet(tmp_path) == []
