"""`narrowgauge run`: one program, watched, and converted if asked."""

from __future__ import annotations

from pathlib import Path

import click

from narrowgauge.cli.ending import say
from narrowgauge.cli.options import OWN_FLAGS_FIRST, command_argument, config_option, steps_option
from narrowgauge.errors import UsageError


@click.command("run", context_settings=OWN_FLAGS_FIRST)
@click.option("--convert", "recipe", metavar="RECIPE", help="Convert the model's linear layers to this recipe.")
@steps_option
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Record tensors every N steps (default: 10).")
@config_option
@click.option("--out", type=click.Path(), help="Folder of the run.")
@command_argument
def run_command(
    recipe: str | None,
    steps: int | None,
    every: int | None,
    config: Path | None,
    out: str | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND (behind `--`) watched; its output and its exit code are its own."""
    from narrowgauge.cli.compare import default_folder
    from narrowgauge.cli.discarding import discard, take_back
    from narrowgauge.cli.outcome import converted, not_found, unended, unrecorded, what_came_of_it
    from narrowgauge.observe.export import check
    from narrowgauge.session.config import load
    from narrowgauge.session.folder import named, not_empty, prepare
    from narrowgauge.session.plan import Plan
    from narrowgauge.session.process.codes import describe_code
    from narrowgauge.session.process.command import arguments, short_name
    from narrowgauge.session.process.launch import watch
    from narrowgauge.session.selection.unmet import unmet

    settings = load(config)
    argv = arguments(command)
    check(settings.for_plan()["export"])
    folder = default_folder(short_name(command)) if out is None else named(out)
    if recipe is not None:
        from narrowgauge.compute.recipes import by_name  # torch loads here, for those who convert

        by_name(recipe)
    prepare(folder)
    plan = Plan(
        variant=recipe or "asis",
        out=str(folder),
        command=command,
        recipe=recipe,
        steps=steps,
        compiling=True,
        **{**settings.for_watching(recipe), **({"every": every} if every else {})},
    )
    try:
        plan.write(new=True)
    except FileExistsError as error:  # another command found the folder empty at the same time, and was quicker
        raise not_empty(folder) from error
    try:
        code = watch(plan, argv)
    except UsageError:  # it could not be started
        discard(folder)
        raise
    if code and (nothing := take_back(folder)):
        say(nothing)
        raise click.exceptions.Exit(code if code >= 0 else 128 - code)
    for told in unmet(folder):
        asked = "" if told.startswith("--") else f"{config or 'settings'}: "
        say(f"{asked}{told}")
    for said in (*not_found(folder), *unrecorded(folder), *unended(folder, code), *converted(folder)):
        say(said)
    say(what_came_of_it(folder, code))
    if code:
        from narrowgauge.session.process.exporting import note

        note(folder, [f"The command ended: {describe_code(code)}."])
        discard(folder)
    raise click.exceptions.Exit(code if code >= 0 else 128 - code)
