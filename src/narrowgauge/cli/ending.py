"""The last words about a program that ran: its exit code is its own, whatever becomes of them."""

from __future__ import annotations

import os

import click


def say(what: str) -> None:
    """Tell it on stderr, if that takes anything: it may be a file on a full disk, or a pipe whose reader is gone."""
    try:
        click.echo(f"narrowgauge: {what}", err=True)
    except OSError:
        # What is left in the stream is written as the interpreter ends, and its exit code would tell of that.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
