"""A run's folder that lacks rank 0's part: what the others wrote is opened, and told whose it is."""

import numpy as np
import pytest

from narrowgauge.cli.main import main
from narrowgauge.cli.outcome import not_found, unended, unrecorded, what_came_of_it
from narrowgauge.errors import RunError
from narrowgauge.observe.store import RunWriter, compact, open_run

ALONE = "rank 0 of 4 recorded nothing here, so this is the part of ranks 1 to 3 of 4 alone"


def write(folder, *ranks, world=4):
    for rank in ranks:
        meta = {"ranks": {"world": world}, "unrecorded": f"rank {rank} says so", "not_found": ["No loss: none."]}
        with RunWriter(folder, meta, rank=rank) as writer:
            writer.add_tensors(1, ["up:input"], {"amax": np.array([float(rank)])})
            writer.add_scalars(1, loss=10.0 * rank)


@pytest.fixture
def folder(tmp_path):
    """Of four ranks, what three wrote."""
    write(tmp_path / "run", 3, 1, 2)
    return tmp_path / "run"


def test_it_opens_with_a_warning_and_has_the_lowest_ranks_numbers(folder):
    with pytest.warns(UserWarning, match=f"run: {ALONE}.$") as told:
        run = open_run(folder)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert (run.status, run.rank, run.ends.words) == ("complete", 1, ALONE)
    assert run.meta["unrecorded"] == "rank 1 says so"
    assert run.scalars("loss")["loss"].tolist() == [10.0]
    assert run.scalars("loss", rank=3)["loss"].tolist() == [30.0]
    assert run.series("up:input", "amax")[1].tolist() == [1.0]
    assert run.heatmap("amax")[2].tolist() == [[3.0]]


def test_an_older_run_does_not_say_how_many_there_were(tmp_path):
    write(tmp_path, 1, world=0)
    with pytest.warns(UserWarning, match="rank 0 of 2 recorded nothing here, so this is the part of rank 1 of 2 alone"):
        open_run(tmp_path)


@pytest.mark.filterwarnings("error")
def test_a_part_that_came_later_is_seen_and_nothing_is_missing_then(folder):
    write(folder, 0)
    run = open_run(folder)
    assert (run.rank, run.ends.words, run.scalars("loss")["loss"].tolist()) == (0, "", [0.0])


def test_a_run_json_that_was_lost_is_no_missing_part(folder):
    write(folder, 0)
    (folder / "run.json").unlink()
    with pytest.raises(RunError, match="holds recorded segments but no run"):
        open_run(folder)
    assert open_run(folder, recover=True).rank == 0


def test_the_report_says_whose_it_is(folder, capsys):
    main(["report", str(folder)])
    said = capsys.readouterr()
    assert f"{folder}: {ALONE}." in said.err
    assert "run: 1 step, loss 10 to 10" in said.out or "up:input" in said.out
    assert ALONE in (folder / "report.html").read_text()


@pytest.mark.filterwarnings("error")
def test_the_command_says_whose_it_is(folder):
    assert what_came_of_it(folder, 0) == f"the run is in {folder}"
    assert unended(folder, 0) == [f"{ALONE}; what was written is kept."]
    assert unrecorded(folder) == ["rank 1 says so"]
    assert not_found(folder) == ["No loss: none."]


@pytest.mark.filterwarnings("ignore:.*recorded nothing here")
def test_it_can_be_compacted(folder):
    assert compact(folder).rows == 6
    assert open_run(folder).series("up:input", "amax")[1].tolist() == [1.0]


def test_a_folder_of_such_runs_names_them(folder):
    with pytest.raises(RunError, match="is not a run but holds runs: run"):
        open_run(folder.parent)
