"""The folder of a run that two commands want at once, or that cannot be written: no program comes to harm by it.

not to be written as the command starts     refused in one message, before the program starts
... from some time on                       the program runs as ever, and is told once
wanted by two commands                      one has it, the other is refused before its program starts
"""

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from tests.session import programs
from tests.session.test_watch import NARROWGAUGE, PLAIN, steps

from narrowgauge.cli.main import cli
from narrowgauge.errors import UsageError
from narrowgauge.observe.store import open_run
from narrowgauge.session.plan import Plan

TELLS = "import sys\nopen(f'ran{sys.argv[1]}', 'w').close()\n" + programs.BASIC
TAKEN = "out is not empty; give another folder with --out, or delete it first."


def test_two_commands_at_once_are_one_run_and_one_refusal(tmp_path):
    (tmp_path / "train.py").write_text(TELLS)
    started = {
        count: subprocess.Popen(
            [*NARROWGAUGE, "run", "--out", "out", "--every", count, "--", "train.py", count],
            cwd=tmp_path, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for count in ("2", "3")
    }  # fmt: skip
    said = {count: process.communicate(timeout=200) for count, process in started.items()}
    codes = {process.returncode: count for count, process in started.items()}
    assert sorted(codes) == [0, 2], said
    assert said[codes[2]] == ("", f"narrowgauge: {TAKEN}\n")
    assert said[codes[0]] == ("finished\n", "narrowgauge: the run is in out\n")
    assert [path.name for path in tmp_path.glob("ran*")] == [f"ran{codes[0]}"]
    found = open_run(tmp_path / "out")
    assert (found.status, steps(tmp_path / "out")) == ("complete", int(codes[0]))
    assert set(found.tensors()["step"].tolist()) == {int(codes[0])}  # by its own cadence
    assert not list((tmp_path / "out").glob("process-*"))


def test_a_folder_that_another_command_takes_meanwhile_stays_that_command_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w').close()\n")
    # It was empty when this one looked; then the other one wrote down what it is to do.
    monkeypatch.setattr("narrowgauge.session.folder.prepare", lambda folder: Plan("asis", "out", ("other.py",)).write())
    done = CliRunner().invoke(cli, ["run", "--out", "out", "--every", "3", "--", "train.py"])
    assert isinstance(done.exception, UsageError)  # which `main` prints, and ends with 2
    assert str(done.exception) == TAKEN
    assert Plan.read(tmp_path / "out" / "plan.json").command == ("other.py",)
    assert not (tmp_path / "ran").exists()


def test_a_folder_below_a_file_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "train.py").write_text("open('ran', 'w').close()\n")
    words = [*NARROWGAUGE, "run", "--out", os.path.join("file", "out"), "--", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, "")
    told = f"cannot write to {os.path.join('file', 'out')}: Not a directory; give another folder with --out."
    assert done.stderr == f"narrowgauge: {told}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "train.py"]


# -------------------------------------------- mounts of a process's own, which no right of a superuser passes by

SHUT = 'import subprocess\nsubprocess.run(["mount", "-o", "remount,ro,bind", "out"], check=True)\n'
SHUT_LATE = SHUT.strip().replace("\n", "; ")


@pytest.fixture(scope="module")
def mounts(tmp_path_factory):
    """The words that start a command with `out` on a mount of its own."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount --bind out out && exec "$@"', "sh"]
    folder = tmp_path_factory.mktemp("mounts")
    (folder / "out").mkdir()
    (folder / "shut.py").write_text(SHUT)
    tried = shutil.which("unshare") and subprocess.run(
        [*words, sys.executable, "shut.py"], cwd=folder, capture_output=True, check=False
    )
    if not tried or tried.returncode:
        pytest.skip("this system lets no process have mounts of its own")
    return words


def shut(folder, mounts, script, *words):
    (folder / "out").mkdir()
    (folder / "train.py").write_text(script)
    command = [*mounts, *words, *NARROWGAUGE, "run", "--out", "out", "--every", "2", "--", "train.py"]
    return subprocess.run(command, cwd=folder, env=PLAIN, capture_output=True, text=True, timeout=200)


def test_a_file_system_that_takes_nothing_is_told_before_anything_runs(tmp_path, mounts):
    first = ("sh", "-c", 'mount -o remount,ro,bind out && exec "$@"', "sh")
    done = shut(tmp_path, mounts, "open('ran', 'w').close()\n", *first)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "narrowgauge: cannot write to out: Read-only file system; give another folder with --out.\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.py"]
    assert not list((tmp_path / "out").iterdir())


@pytest.fixture(scope="module")
def alone(warm_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(programs.EXITS)
    done = warm_python.run([sys.executable, "train.py"], cwd=folder, env=PLAIN)
    assert done.returncode == 7
    return done.stdout


def test_one_that_takes_nothing_when_the_watch_begins_leaves_the_program_alone(tmp_path, mounts, alone):
    done = shut(tmp_path, mounts, SHUT + programs.EXITS)
    assert (done.returncode, done.stdout) == (7, alone)
    told, nothing = done.stderr.splitlines()
    assert told == (
        f"narrowgauge: this process is not watched: RunError: {tmp_path / 'out'} cannot be written (Read-only file "
        "system). Make room, make it writable, or choose another folder."
    )
    assert nothing.startswith("narrowgauge: nothing was watched: ")
    assert nothing.endswith("could be watched before the command ended (exit code 7).")


def test_one_that_takes_nothing_any_more_is_told_once_and_the_program_runs_on(tmp_path, mounts, alone):
    step = "    optimizer.step()\n"
    script = programs.EXITS.replace(step, f"{step}    if step == 3:\n        {SHUT_LATE}\n")
    done = shut(tmp_path, mounts, script)
    assert (done.returncode, done.stdout) == (7, alone)
    told, last = done.stderr.splitlines()
    assert told.startswith(f"narrowgauge: the watch of {tmp_path / 'out'} stopped near step ")
    assert ": the file system became read-only. Training goes on unrecorded" in told
    assert last.startswith("narrowgauge: the run is in out; nothing was recorded before the command ended")
    assert open_run(tmp_path / "out").status in ("killed", "stopped")
