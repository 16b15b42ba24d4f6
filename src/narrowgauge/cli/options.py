"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path

import click

from narrowgauge.errors import UsageError

steps_option = click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="End the program cleanly after N optimizer steps."
)
SETTINGS = Path("narrowgauge.toml")


def _or_tell(context: click.Context, option: click.Parameter, config: Path | None) -> Path | None:
    """Say so where settings lie here that nobody has asked for: a run is what its command says."""
    if config is None and SETTINGS.is_file():
        click.echo(f"narrowgauge: {SETTINGS} is not read; to use it, give --config {SETTINGS}", err=True)
    return config


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    callback=_or_tell,
    help="Settings, such as narrowgauge.toml; none are read by themselves.",
)
# What stands behind the program is the program's, also where `--` is left out and a flag of ours has the same name.
OWN_FLAGS_FIRST = {"allow_interspersed_args": False}
command_argument = click.argument("command", nargs=-1, type=click.UNPROCESSED)


def check_writable(out: Path) -> None:
    """Raise UsageError if `--out` cannot be written: better now than after everything was measured.

    Its folder is made; what is there stays, and keeps its text.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        there = out.exists()
        if there and not (out.is_file() or out.is_dir()):
            return  # a pipe's reader would take our leaving for its end
        with out.open("a"):
            pass
        if not there:
            out.resolve().unlink()  # not the link that led there
    except OSError as error:
        raise UsageError(f"--out: cannot write to {out}: {error.strerror}.") from error
