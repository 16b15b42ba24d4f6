"""benchmarks/soak.py samples the process that trains while it trains, and says what is not flat."""

import itertools
import json
import sys

import pytest
import torch
from benchmarks import soak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_run_is_sampled_until_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "SAMPLE", 0.1)
    for name, value in {"WARM": 1, "SECONDS": 1, "FEWEST": 1, "LEAST": 0}.items():
        monkeypatch.setattr(soak, name, value)
    samples, run = soak.watched(tmp_path, 3000, 50, export=False)
    assert run["status"] == "complete"
    assert run["meta"]["steps"] == 3000
    steps = [row["step"] for row in samples]
    assert steps == sorted(steps)
    assert 0 < steps[-1] < 3000  # when it has made all it ends, and holds less
    assert all(row["rss_kib"] > 0 and row["files"] > 0 and row["threads"] > 0 for row in samples)
    assert soak.judged(samples, "threads")["last"] == samples[-1]["threads"]
    assert all(0 < row["further_files"] <= row["folder_files"] for row in samples)


def test_a_run_whose_steps_are_made_too_soon_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "SAMPLE", 0.1)
    monkeypatch.setattr(soak, "LEAST", 2.0)
    samples, run = soak.watched(tmp_path, 200, 50, export=False)
    assert run["meta"]["steps"] > samples[-1]["step"] > 200


@pytest.mark.parametrize(("least", "made"), [(0.0, 200), (2.0, 200 + 199), (3.0, 200 + 299)])
def test_it_goes_on_for_as_long_as_it_is_told(tmp_path, monkeypatch, least, made):
    ticks = itertools.count()  # the clock is asked before the first step, and once all of them are made
    monkeypatch.setattr("time.monotonic", lambda: next(ticks) / 100)
    monkeypatch.setattr(sys, "argv", ["train.py", "200", str(least)])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        exec(soak.PROGRAM, names)
    assert names["step"] == made


def test_a_run_that_cannot_be_sampled_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "PROGRAM", soak.PROGRAM.replace('Path("pid")', 'Path("other")'))
    monkeypatch.setattr(soak, "LEAST", 0.0)
    with pytest.raises(SystemExit, match="nothing was sampled"):
        soak.watched(tmp_path, 50, 50, export=False)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "complete"


def grown(name, per_sample=0.0, at_first=0.0, peak=0.0):
    """What is found of a figure that is 1000 at 200 times, and grows so; `at_first` in the warm-up alone."""
    samples = [
        {
            "step": 200 * n,
            "seconds": n / 2,
            name: 1000 + per_sample * n + min(at_first * n, at_first * 100) + peak * (n == 195),
        }
        for n in range(1, 201)
    ]
    return soak.problem(soak.judged(samples, name))


def test_what_grows_is_named_with_its_limit():
    assert [grown(name) for name in soak.LIMITS] == [""] * 7
    assert soak.MEANT.keys() == soak.LIMITS.keys()
    # A sample is 200 steps: 10,000 have fifty times as much.
    assert grown("rss_kib", 500) == (
        "the resident memory (KiB) of the process that trains is not flat (per 10k steps: 25000, expected less than "
        f"24576; late peak / early peak: {(1000 + 500 * 200) / (1000 + 500 * 119):.4f}, expected less than 1.1)."
    )
    assert grown("rss_kib", 0.5) == ""
    assert grown("rss_kib", at_first=500) == ""  # caches fill
    assert "late peak / early peak: 1.12, expected less than 1.1)" in grown("rss_kib", peak=120)
    assert grown("export_rss_kib", peak=120) == ""
    assert grown("files", peak=40) == ""  # a merge opens some
    assert "that trains is not flat (late median - early median: 8.1, expected less than 3)" in grown("files", 0.1)
    assert "files in the run's folder" in grown("further_files", 0.1)
    assert soak.problem({"what": "folder_files"}) == ""


def test_files_of_a_run_are_those_that_merging_leaves_and_further_ones(tmp_path):
    for kind, names in {
        "scalars": ("00000000-00000255", "00000256-00000271", "00000272-00000272"),
        "events": (),
    }.items():
        (tmp_path / kind).mkdir()
        for name in names:
            (tmp_path / kind / f"rank0-{name}.parquet").touch()
    (tmp_path / "run.json").touch()
    assert soak.in_folder(tmp_path) == {"folder_files": 4, "further_files": 1}
    (tmp_path / "scalars" / "rank0-00000273-00000273.parquet").touch()
    (tmp_path / "scalars" / ".rank0-half").touch()  # somebody forgot it
    assert soak.in_folder(tmp_path) == {"folder_files": 6, "further_files": 2}
    inside = tmp_path / "what_if" / "current" / "tensors"
    inside.mkdir(parents=True)
    (inside / "rank0-00000000-00000000.parquet").touch()
    assert soak.in_folder(tmp_path) == {"folder_files": 7, "further_files": 2}


def test_a_soak_that_is_too_short_to_be_judged_is_refused(capsys):
    with pytest.raises(SystemExit):
        soak.main(["--steps", "39999"])
    assert "--steps 39999: the first 20000 are not judged; expected 40000 at the least" in capsys.readouterr().err
    samples = [{"step": 20000.0 + n, "seconds": 10.0 + n, "threads": 6.0} for n in range(39)]
    with pytest.raises(
        SystemExit, match="threads was sampled 19 times after the first 20000 steps and 30 s, expected 20"
    ):
        soak.judged(samples, "threads")
    samples += [{"step": 20039.0, "seconds": 49.0, "threads": 6.0}]
    assert soak.problem(soak.judged(samples, "threads")) == ""
