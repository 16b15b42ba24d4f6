"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path

import click

from narrowgauge.errors import UsageError

steps_option = click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="End the program cleanly after N optimizer steps."
)
config_option = click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="Settings: narrowgauge.toml."
)
# What stands behind the program is the program's, also where `--` is left out and a flag of ours has the same name.
OWN_FLAGS_FIRST = {"allow_interspersed_args": False}
command_argument = click.argument("command", nargs=-1, type=click.UNPROCESSED)


def check_writable(out: Path) -> None:
    """Raise UsageError if `--out` cannot be written: better now than after everything was measured.

    Its folder is made; a file that is there keeps its text.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a"):
            pass
        if not out.stat().st_size:
            out.unlink()
    except OSError as error:
        raise UsageError(f"--out: cannot write to {out}: {error.strerror}.") from error
