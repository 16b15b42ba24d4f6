"""benchmarks/soak.py samples the process that trains while it trains."""

import json
import sys

import pytest
from benchmarks import soak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_run_is_sampled_until_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "SAMPLE", 0.1)
    samples, run = soak.watched(tmp_path, 3000, 50, export=False)
    assert run["status"] == "complete"
    assert run["meta"]["steps"] == 3000
    steps = [row["step"] for row in samples]
    assert steps == sorted(steps)
    assert 0 < steps[-1] <= 3000
    assert all(row["rss_kib"] > 0 and row["files"] > 0 and row["threads"] > 0 for row in samples)
    assert soak.judged(samples, "threads")["last"] == samples[-1]["threads"]


def test_a_run_that_cannot_be_sampled_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "PROGRAM", soak.PROGRAM.replace('open("pid", "w")', 'open("other", "w")'))
    with pytest.raises(SystemExit, match="nothing was sampled"):
        soak.watched(tmp_path, 50, 50, export=False)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "complete"
