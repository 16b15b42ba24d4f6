"""Turns the COMMAND behind `--` into a Python program that this process can run in a child of its own.

    train.py ARGS                 the script, with the Python that runs narrowgauge
    python train.py ARGS          the same, with that Python
    python -m package ARGS        a module

Launchers of several processes (torchrun, accelerate, deepspeed, mpirun) are recognised and refused by name where one
process is needed, as in a comparison. `arguments` takes any command at all, for a run that is only followed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import UsageError

PYTHON = re.compile(r"^(python|pypy)[\d.]*$")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun", "horovodrun")
PACKAGED = Path(__file__).resolve().parents[2] / "scripts"
# Interpreter flags that take their value as the next argument.
FLAGS_WITH_VALUE = ("-W", "-X")


@dataclass(frozen=True)
class Program:
    """A Python program: interpreter, its flags, and a script path or a module name with arguments."""

    python: str
    flags: tuple[str, ...]
    target: str
    is_module: bool
    args: tuple[str, ...]

    @property
    def name(self) -> str:
        """A short name for folders and headlines."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem

    def line(self) -> str:
        """The command as a person would type it."""
        # The packaged script lies wherever this machine keeps its packages; nobody types that.
        packaged = Path(self.target).resolve().is_relative_to(PACKAGED)
        shown = f"narrowgauge/scripts/{Path(self.target).name}" if packaged else self.target
        head = ("-m", self.target) if self.is_module else (shown,)
        return " ".join(("python", *self.flags, *head, *self.args))


def parse(command: Sequence[str]) -> Program:
    """Understand COMMAND.

    Raises UsageError when there is none, when the script does not exist, when it starts several processes, or when it
    is no Python program.
    """
    if not command:
        raise UsageError("no script was given; end the command with `-- train.py ARGS` or `-- python train.py ARGS`.")
    head, rest = command[0], list(command[1:])
    if Path(head).name in LAUNCHERS:
        raise UsageError(
            f"{head!r} starts several processes, which narrowgauge cannot follow yet; give the script itself: "
            "`-- train.py ARGS` runs it in one process."
        )
    if not PYTHON.match(Path(head).name):
        return _script(sys.executable, (), head, rest)
    python = shutil.which(head)
    if python is None:
        raise UsageError(f"there is no interpreter {head!r} on this machine's PATH; write `-- train.py ARGS` instead.")
    # `python` means the one that has narrowgauge in it; another interpreter could not import it.
    python = sys.executable
    flags: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        flags.append(rest.pop(0))
        if flags[-1] in FLAGS_WITH_VALUE and rest:
            flags.append(rest.pop(0))
    if not rest:
        raise UsageError(f"{' '.join(command)!r} names no script; expected `-- python train.py ARGS`.")
    if rest[0] in ("-c", "-"):
        raise UsageError(
            f"a program given by {rest[0]!r} cannot be run once per variant; put it into a file and name that."
        )
    if rest[0] == "-m":
        if len(rest) < 2:
            raise UsageError("`python -m` names no module; expected `-- python -m package ARGS`.")
        return Program(python, tuple(flags), rest[1], True, tuple(rest[2:]))
    return _script(python, tuple(flags), rest[0], rest[1:])


def arguments(command: Sequence[str]) -> list[str]:
    """The words to start COMMAND with: a script gets the Python that runs narrowgauge, and so does `python`.

    Raises UsageError when there is no command, no such script or no such program.
    """
    if not command:
        raise UsageError("no command was given; end with `-- train.py ARGS` or `-- torchrun ... train.py ARGS`.")
    head, rest = command[0], list(command[1:])
    if PYTHON.match(head):
        return [sys.executable, *rest]
    if Path(head).suffix == ".py":
        _script(sys.executable, (), head, rest)
        return [sys.executable, head, *rest]
    # Beside the Python that runs narrowgauge lie the launchers of its environment, whether or not that is activated.
    beside = shutil.which(head, path=str(Path(sys.executable).parent)) if os.sep not in head else None
    found = beside or shutil.which(head)
    if found is None and Path(head).is_file() and os.sep in head:
        raise UsageError(f"{head!r} may not be executed; allow it by chmod +x, or name what runs it: `-- sh {head}`.")
    if found is None:
        raise UsageError(
            f"there is no program {head!r} on this machine's PATH; expected `-- train.py ARGS` or a command."
        )
    return [found, *rest]


def short_name(command: Sequence[str]) -> str:
    """A short name for the command's folder: that of its script or module, else of its first word.

    >>> short_name(["torchrun", "--nproc-per-node", "2", "train.py", "--fast"])
    'train'
    """
    words = list(command)
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None and "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    return Path(script or words[0]).stem


def _script(python: str, flags: tuple[str, ...], path: str, args: list[str]) -> Program:
    if not Path(path).is_file():
        hint = "it is a folder" if Path(path).is_dir() else "there is no such file"
        raise UsageError(f"cannot run {path!r}: {hint}; expected a Python script, `-- train.py ARGS`.")
    if Path(path).suffix not in (".py", ""):
        raise UsageError(f"{path!r} is no Python script (its name ends in {Path(path).suffix!r}); expected train.py.")
    return Program(python, flags, path, False, tuple(args))
