"""The folder that a run or a comparison goes to: empty, ours, and told in one message when it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

from narrowgauge.errors import UsageError

FIRST = 8192  # bytes that a run cannot begin without: those of its plan and its run.json


def named(folder: str | os.PathLike[str], how: str = "with --out") -> Path:
    """The folder of that name; UsageError for a name that no folder can have, or that is no UTF-8."""
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"{type(folder).__name__} {folder!r} names no folder; give the name of one {how}.")
    name = os.fsdecode(folder)
    if not name:
        raise UsageError(f"an empty name is no folder's; give the name of one {how}.")
    if "\0" in name:
        raise UsageError(f"{name!r} has a zero byte, which no name of a folder has; give another folder {how}.")
    try:
        str(Path(name).absolute()).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the name of {name!r} is no UTF-8; give another folder {how}.") from error
    return Path(name)


def not_empty(folder: Path, how: str = "with --out") -> UsageError:
    """The error that somebody else's files are there."""
    return UsageError(f"{folder} is not empty; give another folder {how}, or delete it first.")


def prepare(folder: Path, how: str = "with --out") -> None:
    """Make `folder`, or find it empty; `how` is how a user names another one.

    Raises UsageError when it is a file, holds something already, cannot be made or written to, or has no room, and for
    a name that `named` refuses.
    """
    named(folder, how)
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; give a folder {how}.")
        if folder.is_dir() and any(folder.iterdir()):
            raise not_empty(folder, how)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        try:
            probe.write_bytes(bytes(FIRST))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; give another folder {how}.") from error
