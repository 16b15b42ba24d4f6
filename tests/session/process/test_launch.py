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
