"""The last words about a program that ran: its exit code is its own, whatever becomes of them."""

from __future__ import annotations

from contextlib import suppress

import click


def say(what: str) -> None:
    """Tell it on stderr, if that takes anything: it may be a file on a full disk, or a pipe whose reader is gone."""
    with suppress(OSError):
        click.echo(f"narrowgauge: {what}", err=True)
