"""A follower follows while the run grows; a tracker that fails or hangs is told and harms nobody."""

import json
import subprocess
import sys
import threading
import time

import pytest
from tests.observe.export.recorded import STEPS, export, write

from narrowgauge.errors import UsageError
from narrowgauge.observe.export import Exporter, check
from narrowgauge.observe.export import follower as following
from narrowgauge.observe.export.__main__ import REPORT
from narrowgauge.observe.export.follower import Follower
from narrowgauge.observe.store import RunWriter


class Kept(Exporter):
    """Keeps what it is given; `trouble` names the call that raises or hangs."""

    def __init__(self, trouble="", hang=None):
        self.trouble, self.hang, self.calls, self.steps, self.threads = trouble, hang, [], [], set()

    def _call(self, name):
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if name == self.trouble:
            if self.hang is not None:
                self.hang.wait(30)
            raise ConnectionError("the tracker is gone")

    def begin(self, name, facts):
        self._call("begin")
        self.name, self.facts = name, facts

    def scalars(self, points):
        self._call("scalars")
        self.steps += [point.step for point in points]

    def look(self, look):
        self._call("look")

    def event(self, event):
        self._call("event")

    def flush(self):
        self._call("flush")

    def close(self, status):
        self._call("close")
        self.status = status


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_run_is_followed_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "POLL", 0.02)
    kept = Kept()
    follower = Follower("kept", lambda: kept, tmp_path / "run", [])
    follower.start()  # before there is a run, as `narrowgauge run` does
    with RunWriter(tmp_path / "run", {"command": "train.py"}) as writer:
        for step in range(1, 13):
            write(writer, step)
            if step % 4 == 0:
                writer.flush()
                assert until(lambda: kept.steps == list(range(1, step - 3)))  # but for the last segment's  # noqa: B023
        assert "close" not in kept.calls
    follower.end()
    follower.join(20)
    assert not follower.is_alive()
    assert (follower.problem, follower.step, kept.status) == ("", 12, "complete")
    assert (kept.name, kept.facts) == ("run", {"command": "train.py"})
    assert len(kept.threads) == 1
    assert kept.threads != {threading.get_ident()}
    assert (kept.calls.count("look"), kept.calls.count("event")) == (1, 2)


@pytest.mark.parametrize("trouble", ["begin", "scalars", "look", "event", "flush", "close"])
def test_a_tracker_that_fails_is_dropped_and_told(run, trouble, capsys):
    kept = Kept(trouble)
    follower = export(kept, run)
    said = capsys.readouterr().err
    assert said == f"{follower.name} stopped after step {follower.step}: {follower.problem}\n"
    assert follower.report()["problem"] == "ConnectionError: the tracker is gone"
    assert kept.calls.count(trouble) == 1
    assert kept.calls[-1] == trouble  # nothing was asked of it afterwards


def test_a_tracker_that_hangs_holds_up_nobody(run, monkeypatch):
    monkeypatch.setattr(following, "POLL", 0.02)
    gate = threading.Event()
    hanging, well = Kept("scalars", hang=gate), Kept()
    both = [Follower("a", lambda: hanging, run, []), Follower("b", lambda: well, run, [])]
    for follower in both:
        follower.start()
    assert until(lambda: well.steps)
    for follower in both:
        follower.end()
    both[1].join(20)
    assert (well.status, len(well.steps), both[1].report()["problem"]) == ("complete", STEPS, "")
    assert both[0].report()["problem"].startswith("it has not finished")
    gate.set()
    both[0].join(20)


def test_a_run_that_never_was(tmp_path):
    kept = Kept()
    follower = export(kept, tmp_path)
    assert (kept.calls, follower.problem) == ([], "")


def test_a_process_that_exports_ends_with_its_input(run):
    asked = {"folder": str(run), "settings": {"prometheus": {"file": "out.prom"}, "sites": []}, "patience": 30}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "narrowgauge.observe.export"], cwd=run, input=json.dumps(asked) + "\n",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads((run / REPORT).read_text()) == {
        "prometheus": {"step": STEPS, "problem": "", "notes": [], "unmet": []}
    }
    assert "narrowgauge_loss" in (run / "out.prom").read_text()


def test_what_is_unknown_or_not_installed_is_told_before_anything_starts(monkeypatch):
    with pytest.raises(UsageError, match=r"no exporter 'tensorbord'; did you mean 'tensorboard'?"):
        check({"tensorbord": True})
    monkeypatch.setattr("narrowgauge.observe.export.names.find_spec", lambda package: None)
    with pytest.raises(UsageError) as raised:
        check({"mlflow": {"uri": None}, "sites": ["lm_head"], "tensorboard": False})
    assert str(raised.value) == (
        "[export] mlflow: the package mlflow is not installed; install it by `pip install 'narrowgauge[mlflow]'`, "
        "or take mlflow out of the settings."
    )
    check({"tensorboard": False, "wandb": None, "sites": ["lm_head"]})
