"""Writes the pages that are made from the code, so that they cannot lag behind it: `make docs`.

metrics.md from the catalog of metrics, recipes.md from that of recipes, cli.md from the commands themselves, config.md
from the tables of settings, the picture of the speed map from the map that ships with the package, and those of phases
and overhead from benchmarks/results/; and in the README, between its markers, what passed under tests/integrations, as
`make table` wrote it down.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from narrowgauge.bench import pictures
from narrowgauge.bench.map_picture import svg
from narrowgauge.cli.main import VERBS, cli
from narrowgauge.compute.nn.conversion.speed_map import FOLDER
from narrowgauge.compute.recipes import CATALOG, Operand, Recipe
from narrowgauge.metrics.page import render as metrics
from narrowgauge.session.config.page import render as config

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
PASSED = HERE.parent / "tests" / "integrations" / "works_with.json"
RECIPES = ("current", "delayed", "rowwise", "blockwise")
SIZES = ("8b-slice", "1b")
TABLE = re.compile(r"(<!-- works with: .* -->)\n.*?(<!-- end -->)", re.DOTALL)
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}


def recipes() -> str:
    """Every recipe: what it is for, where it comes from, and each operand of each product."""
    lines = [
        "# Recipes",
        "",
        "*Generated from `narrowgauge.compute.recipes`; edit the catalog, not this page.*",
        "",
        "A recipe says for each product of a linear layer which format, how many scales and which scaling",
        "rule each operand gets. Pass one to `ng.convert`, or its name to the command line; `fake-NAME`",
        "quantizes the same way and multiplies in high precision, which separates the error of quantization",
        "from that of the product. Fields change with `recipe.with_(...)`: `margin`, `history`, `algorithm`,",
        "`power_of_two` and more.",
    ]
    for recipe in CATALOG.values():
        lines += [
            "",
            f"## {recipe.name}",
            "",
            recipe.description,
            "",
            *_table(recipe),
            "",
            f"Source: {recipe.source}.",
        ]
    return "\n".join(lines) + "\n"


def _table(recipe: Recipe) -> list[str]:
    rows = [
        "| product | operand | format | one scale per | rule | accumulation |",
        "|---|---|---|---|---|---|",
    ]
    for name in GEMMS:
        gemm = getattr(recipe, name)
        for role, operand in zip(OPERANDS[name], (gemm.a, gemm.b), strict=True):
            rows.append(
                f"| {name} | {role} | {operand.fmt.name} | {_granule(operand)} | {_rule(recipe, operand)} | "
                f"{'fast' if gemm.fast_accum else 'full'} |"
            )
    return rows


def _granule(operand: Operand) -> str:
    words = {"PerTensor": "tensor", "PerRow": "row", "PerColumn": "column"}
    kind = type(operand.granularity).__name__
    return words.get(kind) or f"{operand.granularity.rows}x{operand.granularity.cols} block"  # type: ignore[union-attr]


def _rule(recipe: Recipe, operand: Operand) -> str:
    return recipe.state if recipe.state != "none" else operand.scaling.name


def commands() -> str:
    """The help text of every verb."""
    parts = [
        "# Commands",
        "",
        "*Generated from the commands' own `--help`.*",
        "",
        "Exit codes: 0 done; 2 used wrongly or impossible, with one message that says why; a script that fails by",
        "itself ends the command with its own code.",
    ]
    parent = click.Context(cli, info_name="narrowgauge", **cli.context_settings)
    for verb in VERBS:
        command = cli.get_command(parent, verb)
        if command is None:
            continue
        context, text = _help(command, verb, parent)
        parts += ["", f"## {verb}", "", *text]
        if isinstance(command, click.Group):
            for name, subject in command.commands.items():
                parts += ["", f"### {verb} {name}", "", *_help(subject, name, context)[1]]
    return "\n".join(parts) + "\n"


def _help(command: click.Command, name: str, parent: click.Context) -> tuple[click.Context, list[str]]:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
    return context, ["```text", command.get_help(context).rstrip(), "```"]


def speed_map() -> str:
    """The picture "where FP8 pays"."""
    found = json.loads((FOLDER / "h200.json").read_text())
    title = f"Speed of one layer's step in FP8 over BF16, quantizing included ({found['hardware']}, {found['date']})"
    return svg(found["rows"], title, (2048, 8192, 32768))


def phases(size: str) -> str:
    """The picture "where a step's time goes"."""
    return pictures.phases(json.loads((RESULTS / f"bench_step_{size}_h200.json").read_text()))


def overheads() -> str:
    """The picture "what watching costs"."""
    made = [json.loads((RESULTS / f"bench_overhead_{size}_h200.json").read_text()) for size in SIZES]
    for each in made:
        rows = {row["recipe"]: row for row in each["rows"]}
        each["rows"] = [rows[recipe] for recipe in RECIPES if recipe in rows]  # in one order, and without a peer's
    return pictures.overheads(made)


def works_with() -> str:
    """The README with its table of programs that are watched unedited: what passed when their tests ran last."""
    lines = ["| program | tested with | what of it | on | by us |", "|---|---|---|---|---|"]
    for row in json.loads(PASSED.read_text()):
        module = row["tests"][0].partition("::")[0]
        own, version = next(iter(row["versions"].items()))
        on = f"[{row['on']}]({row['transcript']})" if "transcript" in row else row["on"]
        done = "watched, converted" if row["converted"] else "watched"
        program = f"[{row['program']}](tests/integrations/{module})"
        lines.append(f"| {program} | {own} {version} | {row['seen']} | {on} | {done} |")
    table = "\n".join(lines)
    return TABLE.sub(lambda match: f"{match[1]}\n{table}\n{match[2]}", (HERE.parent / "README.md").read_text())


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics,
    "recipes.md": recipes,
    "cli.md": commands,
    "config.md": config,
    "../README.md": works_with,
    "images/speed_map.svg": speed_map,
    "images/phases_8b-slice.svg": partial(phases, "8b-slice"),
    "images/phases_1b.svg": partial(phases, "1b"),
    "images/overhead.svg": overheads,
}


def main(check: bool) -> int:
    """Write every page; or, to `check`, change nothing and return 1 if one is not what the code says."""
    stale = [name for name, page in PAGES.items() if not _is(HERE / name, page())]
    for name in stale:
        if not check:
            (HERE / name).write_text(PAGES[name]())
        print(f"docs/{name} {'is stale: run `make docs`' if check else 'written'}")
    return 1 if check and stale else 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
