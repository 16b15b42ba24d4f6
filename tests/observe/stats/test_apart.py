"""A process beside the program: nobody's child, and it ends with whoever started it."""

import os
import sys
from pathlib import Path

import pytest

from narrowgauge.observe.stats import apart
from narrowgauge.observe.stats.apart import Apart, said_by

pytestmark = pytest.mark.skipif(not os.path.exists(apart.SHELL), reason="this system has no shell")
READS = [sys.executable, "-S", "-c", "import sys; print(sys.stdin.read(), 'end')"]


def test_it_runs_until_its_input_ends_and_is_heard():
    process = Apart(READS)
    assert process.running()
    process.stop(60)
    assert process.said == b" end\n"
    assert not process.running()


def test_what_cannot_be_started_is_not_running():
    process = Apart(["/nowhere/python"])
    process.listen(60)
    assert not process.running()


def test_a_number_that_is_another_files_by_now_is_left_alone(tmp_path):
    """A program that becomes a daemon has closed whatever was open."""
    process = Apart(READS)
    numbers = process._in, process._out
    for number in numbers:
        os.close(number)
    with (tmp_path / "file").open("wb+") as file:
        file.write(b"x")
        file.seek(0)
        for number in numbers:
            os.dup2(file.fileno(), number)
        assert not process.running()
        process.stop()
        for number in numbers:
            assert os.fstat(number).st_ino == os.fstat(file.fileno()).st_ino
            if number != file.fileno():
                os.close(number)
    assert process.said == b""


PROGRAM = """
import os, signal, sys
from pathlib import Path
met = []
def ended(number, frame):
    try:
        met.append(os.waitpid(-1, os.WNOHANG)[0])
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, ended)
from narrowgauge.session.machine import git_revision
for _ in range(5):
    git_revision(Path.cwd())
print([pid for pid in met if pid])
"""


def test_a_program_that_reaps_what_ends_meets_no_git_of_ours(tmp_path, warm_python):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = warm_python.run([sys.executable, "program.py"], cwd=tmp_path, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_command_that_says_nothing_in_time_is_given_up():
    with pytest.raises(apart.subprocess.TimeoutExpired):
        said_by(READS, Path.cwd(), patience=0.1)
