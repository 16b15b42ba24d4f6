"""What COMMAND may be, and what each wrong one is told."""

import os
import sys

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.session.process.command import arguments, parse


@pytest.fixture(autouse=True)
def interpreters(tmp_path_factory, monkeypatch):
    """Some systems have no `python`, only `python3`."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("python", "python3"):
        (folder / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    return "train.py"


def test_a_script_runs_with_this_python(script):
    program = parse([script, "--lr", "0.1"])
    assert (program.python, program.target, program.args) == (sys.executable, "train.py", ("--lr", "0.1"))
    assert program.line() == "python train.py --lr 0.1"
    assert program.name == "train"


def test_python_and_its_flags_are_understood(script):
    program = parse(["python3", "-W", "ignore", "-O", script, "-m"])
    assert program.flags == ("-W", "ignore", "-O")
    assert program.args == ("-m",)


def test_a_module(script):
    program = parse(["python", "-m", "package.train", "--steps", "3"])
    assert program.is_module
    assert (program.target, program.args, program.name) == ("package.train", ("--steps", "3"), "train")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "no script was given; end the command with `-- train.py ARGS`"),
        (["missing.py"], "cannot run 'missing.py': there is no such file"),
        (["."], "it is a folder"),
        (["python"], "names no script"),
        (["python", "-m"], "names no module"),
        (["python", "-c", "pass"], "put it into a file"),
        (["torchrun", "train.py"], "'torchrun' starts several processes, which narrowgauge cannot follow yet"),
        (["accelerate", "launch", "train.py"], "several processes"),
        (["python9.9", "train.py"], "there is no interpreter 'python9.9'"),
        (["notes.txt"], "is no Python script (its name ends in '.txt')"),
    ],
)
def test_wrong_commands_are_told_why(script, tmp_path, command, says):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError) as raised:
        parse(command)
    assert says in str(raised.value)


def test_the_packaged_script_is_named_without_a_path():
    from narrowgauge.cli.compare import demo_command

    assert parse([*demo_command(), "--steps", "5"]).line() == "python narrowgauge/scripts/gpt.py --steps 5"


def test_what_may_not_be_executed_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_text("echo\n")
    with pytest.raises(UsageError, match=r"'\./train' may not be executed; .* `-- sh \./train`"):
        arguments(["./train"])
