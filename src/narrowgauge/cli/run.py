"""`narrowgauge run`: one program, watched, and converted if asked."""

from __future__ import annotations

from pathlib import Path

import click

from narrowgauge.cli.options import command_argument, config_option, steps_option


@click.command("run")
@click.option("--convert", "recipe", metavar="RECIPE", help="Convert the model's linear layers to this recipe.")
@steps_option
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Record tensors every N steps (default: 10).")
@config_option
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run.")
@command_argument
def run_command(
    recipe: str | None,
    steps: int | None,
    every: int | None,
    config: Path | None,
    out: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND (behind `--`) watched; its output and its exit code are its own."""
    from narrowgauge.cli.compare import default_folder
    from narrowgauge.compute.recipes import by_name
    from narrowgauge.session.command import parse
    from narrowgauge.session.config import load
    from narrowgauge.session.folder import prepare
    from narrowgauge.session.launch import launch
    from narrowgauge.session.plan import Plan

    settings = load(config)
    program = parse(command)
    folder = out or default_folder(program.name)
    if recipe is not None:
        by_name(recipe)
    prepare(folder)
    plan = Plan(
        variant=recipe or "asis",
        out=str(folder),
        command=command,
        recipe=recipe,
        seed=settings.seed,
        steps=steps,
        every=every or settings.every,
        convert=settings.convert,
    )
    ended = launch(plan, quiet=False)
    click.echo(f"narrowgauge: the run is in {folder}", err=True)
    raise click.exceptions.Exit(ended.code if ended.code >= 0 else 128 - ended.code)
