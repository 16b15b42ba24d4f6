"""A command that failed leaves its folder free, unless somebody trained or the files are not ours."""

import json

import pytest

from narrowgauge.cli.discarding import discard, take_back
from narrowgauge.observe.store import RunWriter

REFUSED = {"refused": True, "steps": 0}


def left(folder, *ranks, scalars=()):
    for rank, meta in enumerate(ranks):
        with RunWriter(folder, meta, rank=rank) as writer:
            if rank in scalars:
                writer.add_scalars(0, eval_loss=2.0)
    (folder / "plan.json").write_text("{}")
    return folder


def test_what_was_refused_is_taken_back_with_its_evaluation(tmp_path):
    run = left(tmp_path / "run", REFUSED, REFUSED, scalars=(0, 1))
    assert take_back(run) == f"nothing was trained, so there is no run; {run} can be used again"
    assert not run.exists()


def test_a_rank_that_was_ended_by_its_launcher_says_nothing(tmp_path):
    assert take_back(left(tmp_path / "run", {}, REFUSED))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "scalars"),
    [
        (({"steps": 3}, REFUSED), ()),
        (({}, REFUSED), (0,)),  # it was killed, and had recorded something
        (({"refused": True, "steps": 3},), ()),  # its second model could not be converted
        (({"steps": 0},), ()),
    ],
)
def test_what_somebody_recorded_is_kept(tmp_path, ranks, scalars):
    run = left(tmp_path / "run", *ranks, scalars=scalars)
    held = sorted(run.rglob("*"))
    assert take_back(run) == ""
    discard(run)
    assert sorted(run.rglob("*")) == held
    assert json.loads((run / "run.json").read_text())["status"] == "complete"


@pytest.mark.parametrize(("inner", "kept"), [(REFUSED, False), ({"steps": 3}, True)])
def test_attempts_inside_of_it_go_with_it_or_keep_it(tmp_path, inner, kept):
    run = left(tmp_path / "run", REFUSED)
    RunWriter(run / "restart-1", inner).close()
    assert bool(take_back(run)) != kept
    assert (run / "run.json").exists() == kept


def test_files_of_others_are_kept(tmp_path):
    run = left(tmp_path / "run", REFUSED)
    (run / "model.pt").write_text("")
    assert take_back(run) == f"nothing was trained, so there is no run; other files are left in {run}"
    assert [path.name for path in run.iterdir()] == ["model.pt"]
