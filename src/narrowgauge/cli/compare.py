"""`narrowgauge compare`: a script as written and in FP8, side by side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

import narrowgauge.scripts
from narrowgauge.cli.options import OWN_FLAGS_FIRST, command_argument, config_option, steps_option

if TYPE_CHECKING:
    from narrowgauge.session.plan import Baseline


def demo_command() -> tuple[str, ...]:
    """The packaged script: what is compared when no command is given."""
    return (str(Path(narrowgauge.scripts.__path__[0]) / "gpt.py"),)


def default_folder(name: str) -> Path:
    """A folder that is not there yet."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@click.command("compare", context_settings=OWN_FLAGS_FIRST)
@click.option("--recipes", default="current,delayed,blockwise", show_default=True, help="FP8 recipes, comma-separated.")
@click.option(
    "--baseline",
    type=click.Choice(["asis", "bf16", "fp16", "fp32"]),
    default="asis",
    show_default=True,
    help="The script's own dtype, or with autocast added (bf16, fp16) or removed (fp32).",
)
@steps_option
@config_option
@click.option("--out", type=click.Path(), help="Folder for the runs and the report.")
@command_argument
def compare_command(
    recipes: str,
    baseline: Baseline,
    steps: int | None,
    config: Path | None,
    out: str | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as written and in FP8, side by side, and say whether FP8 is safe and worth it.

    COMMAND is `train.py ARGS`, `python train.py ARGS` or `python -m package ARGS`, behind `--`. Without one, the
    packaged example is compared: a small language model trained on the Python standard library's own source.
    """
    from narrowgauge.cli.progress import LiveProgress
    from narrowgauge.observe.export import check
    from narrowgauge.observe.report import render
    from narrowgauge.session.compare import REPORT_FILE, Comparison, compare
    from narrowgauge.session.config import load
    from narrowgauge.session.folder import named
    from narrowgauge.session.process.command import parse
    from narrowgauge.session.selection.unmet import unmet

    command = command or demo_command()
    settings = load(config)
    check(settings.for_plan()["export"])
    console = Console()
    what = Comparison(
        command=command,
        out=default_folder(parse(command).name) if out is None else named(out),
        recipes=tuple(name.strip() for name in recipes.split(",") if name.strip()),
        baseline=baseline,
        steps=steps,
        config=settings,
    )
    with LiveProgress(console) as progress:
        verdict = compare(what, progress)
    console.print(render(verdict))
    for told in dict.fromkeys(told for name in what.recipes for told in unmet(what.out / name)):
        click.echo(f"narrowgauge: {config or 'settings'}: {told}", err=True)
    console.print(f"\nThe report: {what.out / REPORT_FILE}", soft_wrap=True)
