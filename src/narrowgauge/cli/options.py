"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path

import click

steps_option = click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="End the program cleanly after N optimizer steps."
)
config_option = click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="Settings: narrowgauge.toml."
)
command_argument = click.argument("command", nargs=-1, type=click.UNPROCESSED)
