"""A run's process: it ends with the one that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narrowgauge.session.plan import Plan
from narrowgauge.session.process.launch import launch

PARENT = """
import sys
from pathlib import Path
from narrowgauge.session.process.launch import launch
from narrowgauge.session.plan import Plan
launch(Plan(variant="x", out=sys.argv[1], command=("train.py",)))
"""
SCRIPT = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(120)\n"


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_a_question_is_answered_by_the_end_of_the_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("input('really? ')\n")
    reader, writer = os.pipe()  # an input that never ends, as a terminal's
    kept = os.dup(0)
    os.dup2(reader, 0)
    try:
        ended = launch(Plan(variant="x", out="out", command=("train.py",)))
    finally:
        os.dup2(kept, 0)
        os.close(writer)
    assert ended.code == 1
    assert ended.last_lines[-1].startswith("EOFError")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_comparison_leaves_no_run_behind(tmp_path, how):
    (tmp_path / "train.py").write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "out"], cwd=tmp_path)
    told = tmp_path / "pid"
    assert until(lambda: told.exists() and told.read_text())
    os.kill(parent.pid, how)
    parent.wait()
    assert until(lambda: not alive(int(told.read_text())), 10.0)


WATCHES = """
import signal, subprocess, sys
from narrowgauge.session.plan import Plan
from narrowgauge.session.process import launch
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
class Early(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        super().__init__(*args, **kwargs)
if sys.argv[1] == "early":
    launch.subprocess.Popen = Early
plan = Plan(variant="asis", out="out", command=("train.py",))
plan.write()
code = launch.watch(plan, [sys.executable, "train.py"])
print(code, signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM))
"""
TOLD = """
import signal, time
print(signal.getsignal(signal.SIGHUP), flush=True)
while {waits}:
    time.sleep(0.1)
"""


def watches(tmp_path, when, *, waits):
    (tmp_path / "train.py").write_text(TOLD.format(waits=waits))
    command = [sys.executable, "-c", WATCHES, when]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_a_signal_before_the_program_has_started_is_kept_for_it(tmp_path):
    done = watches(tmp_path, "early", waits=True)
    left = f"{signal.Handlers.SIG_IGN!s} {signal.Handlers.SIG_DFL!s}"
    assert done.stdout.splitlines()[-1] == f"{-signal.SIGTERM} {left}", done.stderr


def test_what_is_ignored_is_ignored_by_the_program_too(tmp_path):
    done = watches(tmp_path, "", waits=False)
    ignored = signal.Handlers.SIG_IGN
    assert done.stdout.splitlines() == [f"{ignored!s}", f"0 {ignored!s} {signal.Handlers.SIG_DFL!s}"], done.stderr
