"""The command `narrowgauge`: one file per verb, loaded when it is called.

Exit codes: 0 done; 2 used wrongly, or impossible (with one message that says why); a script that fails by itself ends
the command with its own code.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys

import click

from narrowgauge.errors import NarrowgaugeError

VERBS = {
    "compare": "Is FP8 safe and worth it for this training script?",
    "run": "Run a training script watched, and converted if asked.",
    "report": "Make a page (or text) from recorded runs.",
    "inspect": "What a checkpoint holds, and what each FP8 recipe would make of it.",
    "bench": "Measure kernels, products and training steps on this machine, beside BF16 and peers.",
    "doctor": "What this machine can run, and what to do about it.",
}

# What a disk says that takes no more, also where a log or a pipe leads to it.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Verbs(click.Group):
    """A group whose commands are imported when they are needed: `--help` loads no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order a user meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's file."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"narrowgauge.cli.{cmd_name}")
        command = getattr(module, f"{cmd_name}_command")
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest verb in the error."""
        from narrowgauge.errors import nearest

        if args and not args[0].startswith("-") and args[0] not in VERBS:
            raise click.UsageError(f"there is no verb {args[0]!r}; {nearest(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="narrowgauge")
def cli() -> None:
    """Train in FP8, watch every number, and know whether it was safe and worth it."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; errors raised on purpose become one message and exit code 2 (or the script's own)."""
    try:
        # Outside of standalone mode click returns the code of an Exit instead of raising it.
        code = cli.main(args=argv, prog_name="narrowgauge", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; what was recorded is kept.", err=True)
        sys.exit(130)
    except NarrowgaugeError as error:
        click.echo(f"narrowgauge: {error}", err=True)
        sys.exit(getattr(error, "code", 2))
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        click.echo(f"narrowgauge: what this command prints or writes could not be: {error.strerror}.", err=True)
        leave_unsaid()
        sys.exit(2)
    if isinstance(code, int) and code:
        sys.exit(code)


def leave_unsaid() -> None:
    """Have what stdout has not taken go nowhere: Python would try once more as it ends, and fail aloud."""
    with contextlib.suppress(OSError, AttributeError):  # it is none that has a number
        number = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


if __name__ == "__main__":
    main()
