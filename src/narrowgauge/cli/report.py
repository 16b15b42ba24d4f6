"""`narrowgauge report`: a page, or text, from what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="The page to write (default: report.html beside the runs)."
)
@click.option("--text", is_flag=True, help="Print step by step, at full precision, instead.")
def report_command(runs: tuple[Path, ...], out: Path | None, text: bool) -> None:
    """Make a page from RUN... (run folders, or the folder of a comparison)."""
    from narrowgauge.observe.report import text as as_text
    from narrowgauge.observe.report import write_report
    from narrowgauge.observe.store import open_run
    from narrowgauge.observe.verdict import Verdict

    verdict = None
    folders: list[Path] = []
    for path in runs:
        found = path / "verdict.json"
        if not found.is_file():
            folders.append(path)
            continue
        verdict = Verdict.from_dict(json.loads(found.read_text()))
        names = ["baseline", "noise", *(v.name for v in verdict.variants)]
        folders += [path / name for name in names if (path / name).is_dir()]
    opened = {folder.name: open_run(folder) for folder in folders}
    if text:
        for name, run in opened.items():
            click.echo(f"# {name}" if len(opened) > 1 else "", nl=len(opened) > 1)
            click.echo(as_text(run))
        return
    target = out or runs[0] / "report.html"
    write_report(verdict, opened, target)
    click.echo(f"The report: {target}")
