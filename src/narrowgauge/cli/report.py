"""`narrowgauge report`: a page, or text, from what was recorded."""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from narrowgauge.errors import RunError, UsageError

if TYPE_CHECKING:
    from narrowgauge.observe.store import Run
    from narrowgauge.observe.verdict import Verdict

WORST = 3  # tensors of a run that are named on the terminal


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="The page to write (default: report.html beside the runs)."
)
@click.option("--text", is_flag=True, help="Print step by step, at full precision, instead.")
def report_command(runs: tuple[Path, ...], out: Path | None, text: bool) -> None:
    """Make a page from RUN... (run folders, or the folder of a comparison)."""
    if text and out is not None:
        raise UsageError("--text prints, and writes no page; leave out -o, or --text.")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _report(runs, out, text)
    for message in dict.fromkeys(str(warning.message) for warning in told):
        click.echo(f"narrowgauge: {message}", err=True)


def _report(runs: tuple[Path, ...], out: Path | None, text: bool) -> None:
    from narrowgauge.observe.report import text as as_text
    from narrowgauge.observe.report import write_report
    from narrowgauge.observe.report.further import further
    from narrowgauge.observe.report.readiness import plain, readiness
    from narrowgauge.observe.report.words import scrub
    from narrowgauge.observe.store import open_run
    from narrowgauge.observe.store.shape import FACTS, fault
    from narrowgauge.observe.verdict.began import began
    from narrowgauge.observe.verdict.worst import worst_tensors

    verdict, judged = None, None
    named: list[Path] = []  # by the verdict, whose names they keep
    folders: list[Path] = []
    for path in runs:
        found = path / "verdict.json"
        if not found.is_file():
            folders.append(path)
        elif judged is None:
            verdict, judged = _verdict(found), path
            names = ["baseline", "noise", *(v.name for v in verdict.variants)]
            named += [path / name for name in names if (path / name).is_dir()]
        elif path.resolve() != judged.resolve():
            raise RunError(
                f"{judged} and {path} are two comparisons, and a page has one verdict. Make a page of each, or name "
                f"runs of them: {judged}/baseline {path}/baseline"
            )
    opened = {name: open_run(folder, skip_corrupt=True) for name, folder in _names(named, folders).items()}
    for run in opened.values():
        for facts in run.metas.values():
            if wrong := fault(facts, FACTS):
                raise RunError(
                    f"{run.path}: of the facts in its run.json, {wrong}. No page can be made of that: repair it."
                )
    if text:
        for name, run in opened.items():
            click.echo(f"# {name}" if len(opened) > 1 else "", nl=len(opened) > 1)
            click.echo(as_text(run))
        return
    target = out or runs[0] / "report.html"
    write_report(verdict, opened, target)  # first: a reader of what follows may leave, as `head` does
    for name, run in opened.items():
        if verdict is None and (ended := _ended(run)):
            click.echo(f"{name}: {ended}")
        if broke := began(run):
            click.echo(f"{name}: {broke}")
        ready = readiness(run)
        if ready is not None:
            click.echo(f"{name}: {plain(ready)}")
        elif verdict is None:
            worst = worst_tensors(run, WORST)
            for each in worst:
                click.echo(f"{name}: {each.site}: {each.why}")
            if not worst:
                click.echo(f"{name}: {_how_far(run)}, no tensor to judge")
                for why in _why_none(run):
                    click.echo(f"{name}: {why}")
        if verdict is None:  # a comparison told its own when it ended
            for note in run.meta.get("notes") or ():
                click.echo(f"{name}: note: {scrub(str(note))}")
        if inside := further(run.path, shlex.quote(str(run.path))):
            click.echo(f"{name}: {inside}")
    click.echo(f"The report: {target}")


def _names(named: Sequence[Path], others: Sequence[Path]) -> dict[str, Path]:
    """Each folder by its name; of several of one name by as much of their paths as tells them apart."""
    found = {folder.resolve(): folder for folder in (*named, *others)}  # "." has no name, and a folder may come twice
    keep = {folder.resolve() for folder in named}
    names: dict[str, Path] = {}
    for whole, folder in found.items():
        parts = 1
        while whole not in keep and any(
            other != whole and other.parts[-parts:] == whole.parts[-parts:] for other in found
        ):
            parts += 1
        names["/".join(whole.parts[-parts:])] = folder
    return names


def _ended(run: Run) -> str:
    """How it ended, and after how much; "" of a run that came to its end, with all of its ranks."""
    from narrowgauge.observe.report.facts import how_it_ended

    if run.status == "complete" and not run.meta.get("exit_code"):
        return run.ends.words
    how = how_it_ended(run)
    # What it did in its last seconds is lost if it had no time to write it.
    return f"{'ended ' if how.startswith(('with ', 'by ')) else ''}{how}; recorded: {_how_far(run)}"


def _why_none(run: Run) -> list[str]:
    """Why there is no tensor to judge, as far as that is known; what one of several ranks lacks, others may have."""
    missing = () if run.meta.get("ranks") else run.meta.get("not_found") or ()
    return [str(why) for why in (run.meta.get("unrecorded"), *missing) if why]


def _how_far(run: Run) -> str:
    """So many steps, and the loss at the first and the last of those that have one; of each turn apart."""
    from narrowgauge.observe.report.steps import number, turns
    from narrowgauge.observe.report.words import listing

    table = run.scalars()
    made = number(run, table)
    steps = f"{made} step{'' if made == 1 else 's'}"
    if "loss" not in table.columns:
        return steps
    of_each = [[loss for loss in table["loss"][rows].tolist() if math.isfinite(loss)] for _, rows in turns(table)]
    told = [f"{losses[0]:.4g} to {losses[-1]:.4g}" for losses in of_each if losses]
    return f"{steps}, loss {listing(told)}" if told else steps


def _verdict(path: Path) -> Verdict:
    from narrowgauge.observe.verdict import Verdict

    known = Verdict.schema
    hint = f"Delete it to have a page of the runs alone, or name the runs: {path.parent}/*/"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = data.get("schema") if isinstance(data, dict) else None
        if isinstance(schema, int) and schema > known:
            raise RunError(
                f"{path} has verdict schema {schema}; this narrowgauge reads up to schema {known}. "
                f"Upgrade narrowgauge. {hint}"
            )
        if isinstance(schema, int):
            return Verdict.from_dict(data)
        why: object = "it has no schema number"
    except OSError as error:
        why = error.strerror
    except (ValueError, RecursionError):
        why = "it is no JSON"
    except KeyError as error:
        why = f"it has no {error}"
    except (TypeError, AttributeError):
        why = "a part of it is no part of a verdict"
    raise RunError(f"{path} cannot be read: {why}. {hint}")
