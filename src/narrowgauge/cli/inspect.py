"""`narrowgauge inspect`: any file of tensors, offline: what it holds, and what each FP8 recipe would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from narrowgauge.cli.options import check_writable
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.compute.recipes import Recipe
    from narrowgauge.observe.inspect import Inspection

ROLES = ("weight", "input", "grad_output")


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--recipes", metavar="LIST", help="FP8 recipes to try, comma-separated (default: all).")
@click.option(
    "--role",
    type=click.Choice(ROLES),
    help="As which operand of a linear layer the matrices are looked at (default: as a dump's names say, else weight).",
)
@click.option("--only", multiple=True, metavar="GLOB", help="Tensors to look at; may be given several times.")
@click.option(
    "--top", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Rows of a table, at most."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, and nothing else.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the JSON to FILE.")
def inspect_command(
    file: Path, recipes: str | None, role: str | None, only: tuple[str, ...], top: int, as_json: bool, out: Path | None
) -> None:
    """Look at every tensor of FILE, and at what each FP8 recipe would make of it.

    FILE is safetensors, a torch checkpoint (.pt, .pth, .bin, .ckpt) or an index of shards (.index.json). Nothing that
    a file says is run. FP8 tensors are decoded with their scales, and what is in their codes is counted.
    """
    from narrowgauge.observe.inspect.as_json import as_json as written

    wanted = None if recipes is None else _recipes(recipes)
    if out is not None:
        _try(out, file)
    seen = _look(file, wanted, role, only)
    if out is not None:
        out.write_text(written(seen), encoding="utf-8")
    if as_json:
        click.echo(written(seen), nl=False)
    else:
        _show(seen, top)


def _recipes(text: str) -> tuple[Recipe, ...]:
    from narrowgauge.compute.recipes import by_name

    named = [by_name(name) for name in text.split(",") if name.strip()]
    if not named:
        raise UsageError("no recipe was named; expected for example `--recipes current,blockwise`.")
    doubled = sorted({recipe.name for recipe in named if named.count(recipe) > 1})
    if doubled:
        raise UsageError(f"{', '.join(doubled)} is named twice in --recipes; name each recipe once.")
    return tuple(named)


def _try(out: Path, file: Path) -> None:
    """Raise UsageError if the file cannot be written, or is the one to look at."""
    if out.exists() and file.exists() and out.samefile(file):
        raise UsageError(f"--out is {out}, the very file to look at; give another one.")
    check_writable(out)


def _look(file: Path, recipes: tuple[Recipe, ...] | None, role: str | None, only: tuple[str, ...]) -> Inspection:
    """Look, with a bar on a terminal that goes away when all is seen."""
    from rich.console import Console
    from rich.progress import Progress

    from narrowgauge.compute.recipes import CATALOG
    from narrowgauge.observe.inspect import inspect, open_checkpoint

    console = Console(stderr=True)
    checkpoint = open_checkpoint(file)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(file.name, total=sum(max(1, entry.numel) for entry in checkpoint.entries))
        return inspect(
            checkpoint,
            recipes=recipes or tuple(CATALOG.values()),
            role=role,
            only=only,
            progress=lambda entry: bars.advance(task, max(1, entry.numel)),
        )


def _show(seen: Inspection, top: int) -> None:
    from rich.console import Console

    from narrowgauge.observe.inspect import page, plain

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(page(seen, top), crop=False)
    else:  # a pipe or a file has no width of its own
        click.echo(plain(seen, top), nl=False)
