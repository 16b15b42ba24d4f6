"""Killed, out of disk, a folder gone, a clock set: training goes on to the same numbers; what was recorded is read."""

import errno
import itertools
import json
import logging
import os
import shutil
import sys
import types

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.cli.main import main
from narrowgauge.observe.export.tail import Tail
from narrowgauge.session.process.live import Live

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = (model(X) - X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def watched(folder, between, steps=(6, 6)):
    """Losses of a watched training that something happens to after some steps, beside those of an unwatched one."""
    model, optimizer = made()
    with ng.watch(model, out=folder, every=2):
        losses = train(model, optimizer, steps[0])
        Live.current.writer.flush()
        between()
        losses += train(model, optimizer, steps[1])
    assert losses == train(*made(), sum(steps))
    return losses


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_disk_that_fills(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    losses = watched(tmp_path / "a", lambda: monkeypatch.setattr("narrowgauge.observe.store.segments.copy_aside", full))
    (told,) = warnings_of(caplog)  # one for the run and all that is beside it
    assert "no space left on the device. Training goes on unrecorded" in told
    run = ng.open_run(tmp_path / "a")
    assert (run.status, run.reason) == ("stopped", "no space left on the device")
    # The sixth step's scalars wait for the seventh to begin.
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(losses[:5])
    assert run.lost["scalars"] > 0
    assert run.lost["tensors"] > 0


def test_a_folder_that_vanishes(tmp_path, caplog):
    watched(tmp_path / "a", lambda: shutil.rmtree(tmp_path / "a"))
    (told,) = warnings_of(caplog)
    assert "No such file or directory" in told
    assert "Training goes on unrecorded" in told
    assert not (tmp_path / "a" / "run.json").exists()


def test_a_part_of_a_run_that_vanishes_is_told_in_it(tmp_path, caplog):
    watched(tmp_path / "a", lambda: shutil.rmtree(tmp_path / "a" / "what_if"))
    run = ng.open_run(tmp_path / "a")
    assert run.status == "complete"
    (told,) = run.meta["unmet"]
    assert warnings_of(caplog) == [f"narrowgauge: {told}"]  # at the end
    assert told.startswith("watch.what_if: it ended early, and rows of it are missing: RunError: ")
    assert "No such file or directory" in told


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps(tmp_path, monkeypatch, jump):
    beats = itertools.count()
    clock = {"offset": 1e9}
    shown = types.SimpleNamespace(**{name: getattr(writer_time(), name) for name in ("monotonic", "sleep")})
    shown.time = lambda: clock["offset"] + next(beats)
    monkeypatch.setattr("narrowgauge.observe.store.writer.time", shown)
    losses = watched(tmp_path / "a", lambda: clock.update(offset=1e9 + jump))
    run = ng.open_run(tmp_path / "a")
    assert run.status == "complete"
    assert run.scalars("loss")["step"].tolist() == list(range(1, 13))
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(losses)
    seconds = run.scalars("step_seconds")["step_seconds"]
    assert (seconds >= 0).all()
    assert (seconds < 600).all()  # laps are taken by a clock that nobody sets
    when = run.sql("SELECT step, min(wall_time) AS wall FROM scalars GROUP BY step ORDER BY step")["wall"]
    assert (abs(when[5:] - when[:5].max()) > 9e5).all()  # rows say what the clock said
    points = [point for batch in Tail(tmp_path / "a").points(final=True) for point in batch]
    assert [point.step for point in points] == list(range(1, 13))  # and go out in the order of their steps
    main(["report", str(tmp_path / "a"), "--text"])


def writer_time():
    from narrowgauge.observe.store import writer

    return writer.time


KILLED = """
import json, os, random, signal, sys
from pathlib import Path
import torch
from torch import nn
torch.set_num_threads(1)
import narrowgauge as ng
from narrowgauge.observe.stats import host
from narrowgauge.session.process.live import Live
host.wait()
base, chance, ended = Path(sys.argv[1]), random.Random(11), {}
for number in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        with ng.watch(model, out=base / f"run{number}", every=2):
            writer = Live.current.writer  # whose segments are as short as can be had
            writer._thread._seconds, writer._waiting.segment = 0.02, (1, 1)
            armed = False
            while True:
                # The first run is killed as it begins, the others some time after their first segment.
                if not armed and (number == 0 or any((base / f"run{number}" / "tensors").glob("rank*"))):
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.7 * chance.random())  # nobody handles it: it kills
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    chance.random()
    ended[f"run{number}"] = os.waitpid(child, 0)[1]
print(json.dumps(ended))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_training_killed_at_any_moment_leaves_its_steps(warm_python, tmp_path, capsys):
    (tmp_path / "killed.py").write_text(KILLED)
    done = warm_python.run([sys.executable, "killed.py", tmp_path, "4"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert all(ended.values())
    found = []
    for name in ended:
        run = ng.open_run(tmp_path / name)
        assert run.status == "killed"
        main(["report", str(tmp_path / name), "--text"])
        steps = run.scalars("loss")["step"].tolist() if run.metrics else []
        found.append(len(steps))
        if not steps:
            continue
        assert steps == list(range(1, len(steps) + 1))
        assert run.scalars("loss")["loss"].tolist() == pytest.approx(train(*made(), len(steps)), rel=1e-6)
        rows = run.tensors()
        recorded = sorted(set(rows["step"].tolist()))
        assert recorded == list(range(2, 2 * len(recorded) + 1, 2))
        assert len(rows["site"]) == len(recorded) * len(run.sites)  # whole steps only
    assert all(found[1:]), found
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
