"""A compiled graph that was kept on disk is not found again by other code of ours."""

import importlib

from narrowgauge.compute.nn.tracing import revision
from narrowgauge.compute.nn.tracing.in_graph import REMADE, Traced
from narrowgauge.compute.recipes import by_name


def test_other_code_has_another_number_and_graphs_are_told(tmp_path, monkeypatch):
    before = revision.REVISION
    assert Traced.of(by_name("blockwise"), REMADE).whole[-1] == before
    changed = tmp_path / "changed.py"
    paths = list(revision._TRACED)
    assert all(path.exists() for path in paths)
    for at, path in enumerate(paths):
        changed.write_bytes(path.read_bytes() + b"#")
        monkeypatch.setattr(revision, "_TRACED", (*paths[:at], changed, *paths[at + 1 :]))
        assert revision._number() != before, path.name
    monkeypatch.undo()
    again = importlib.reload(revision).REVISION
    assert again == before  # and the same code the same one
