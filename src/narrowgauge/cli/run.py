"""`narrowgauge run`: one program, watched, and converted if asked."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import click

from narrowgauge.cli.options import OWN_FLAGS_FIRST, command_argument, config_option, steps_option
from narrowgauge.errors import RunError, UsageError

INSIDE = ("process", "restart")  # what folders of further runs begin with


@click.command("run", context_settings=OWN_FLAGS_FIRST)
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
    from narrowgauge.observe.export import check
    from narrowgauge.session.config import load
    from narrowgauge.session.folder import prepare
    from narrowgauge.session.plan import Plan
    from narrowgauge.session.process.command import arguments, short_name
    from narrowgauge.session.process.launch import describe_code, watch
    from narrowgauge.session.selection.unmet import unmet

    settings = load(config)
    argv = arguments(command)
    check(settings.for_plan()["export"])
    folder = out or default_folder(short_name(command))
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
        code = watch(plan, argv)
    except UsageError:  # it could not be started
        discard(folder)
        raise
    for told in unmet(folder):
        asked = "" if told.startswith("--") else f"{config or 'settings'}: "
        click.echo(f"narrowgauge: {asked}{told}", err=True)
    for missing in (*not_found(folder), *unrecorded(folder), *unended(folder, code)):
        click.echo(f"narrowgauge: {missing}", err=True)
    click.echo(f"narrowgauge: {what_came_of_it(folder, code)}", err=True)
    if code:
        from narrowgauge.session.process.exporting import note

        note(folder, [f"The command ended: {describe_code(code)}."])  # sys.exit tells nobody in the process
        discard(folder)
    raise click.exceptions.Exit(code if code >= 0 else 128 - code)


def not_found(folder: Path) -> list[str]:
    """What a program that trains has and no rank found, in the words of the first: the loss may be another stage's."""
    first, *others = [facts.get("not_found") for facts in _of_ranks(folder)] or [None]
    # A rank that ended without a word says nothing.
    also = [{_what(missing) for missing in found} for found in others if found is not None]
    return [missing for missing in first or () if all(_what(missing) in found for found in also)]


def _what(missing: str) -> str:
    return str(missing).partition(":")[0]


def unrecorded(folder: Path) -> list[str]:
    """That a program ended before its first recorded step, in one sentence; none if it did not."""
    return [str(facts["unrecorded"]) for facts in _of_ranks(folder)[:1] if facts.get("unrecorded")]


def unended(folder: Path, code: int) -> list[str]:
    """Which ranks of the run, and of those inside of it, did not come to their end; none where there is one rank.

    Where that cannot be read although somebody wrote there, why.
    """
    from narrowgauge.observe.store import manifest as manifests
    from narrowgauge.observe.store import open_run

    told = []
    for path in (folder, *sorted(path for name in INSIDE for path in folder.glob(f"{name}-*"))):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it would say that rank 0's part is missing, as is said below
                ends = open_run(path).ends
        except RunError as error:
            told += [str(error)] if manifests.ranks(path) else []
            continue
        # A rank that makes no optimizer records nothing, and that is no news where all went well, unless it is the
        # one whose part is looked at first.
        if ends.words and (ends.unended or (ends.missing and code) or 0 in ends.missing):
            told.append(f"{'' if path == folder else f'{path.name}: '}{ends.words}; what was written is kept.")
    return told


def _of_ranks(folder: Path) -> list[dict[str, Any]]:
    """What the session of each rank that has a part here learned."""
    from narrowgauge.observe.store import manifest as manifests

    return [_facts(folder / manifests.name(rank)) for rank in manifests.ranks(folder)]


def _facts(manifest: Path) -> dict[str, Any]:
    """What one rank's session learned; nothing without."""
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        return dict(json.loads(manifest.read_text())["meta"])
    return {}


def what_came_of_it(folder: Path, code: int) -> str:
    """Where the run is; or that there is none, and why that may be."""
    if not folder.exists():  # it held at least the plan
        return f"{folder} was removed while the command ran, and what was recorded with it."
    inside = sorted({path.parent.name for name in INSIDE for path in folder.glob(f"{name}-*/run*.json")})
    if _of_ranks(folder):
        more = f"; inside of it are those of processes that began later: {', '.join(inside)}" if inside else ""
        return f"the run is in {folder}{more}"
    if inside:
        return f"the run is in {', '.join(str(folder / name) for name in inside)}"
    nothing = "nothing was watched: no Python process below this command made a torch.optim optimizer"
    if code:
        from narrowgauge.session.process.launch import describe_code

        return f"{nothing} before the command ended ({describe_code(code)})."
    return (
        f"{nothing}. A program that starts Python with -I, -E or -S, or in a container or on another machine, cannot "
        "be followed from here."
    )


def discard(folder: Path) -> None:
    """Leave nothing of a command that failed before anything was recorded: it is tried again, with the same --out."""
    from narrowgauge.session.plan import PLAN_FILE
    from narrowgauge.session.process.exporting import LOG, REPORT

    with contextlib.suppress(OSError):
        ours = list(folder.iterdir())
        if {entry.name for entry in ours} <= {PLAN_FILE, LOG, REPORT}:
            for entry in ours:
                entry.unlink()
            folder.rmdir()
