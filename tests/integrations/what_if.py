"""What other recipes would do to a program's tensors, by hand and in its run, and how its report ranks them."""

import math
import statistics

import pytest
from click.testing import CliRunner
from tests.integrations.differences import differences

from narrowgauge.cli.report import report_command
from narrowgauge.observe.report.readiness import plain, readiness

RECIPES = ("current", "rowwise", "blockwise", "mxfp8", "mxfp8-ocp")  # those without state, from simple to fine
HAND = {"RECIPES": " ".join(RECIPES[1:])}
NEAR = 1.0  # dB: the simplest that comes so near to the best is taken
ROUNDED = 0.051  # dB: to one decimal, and a bit for sums of float32
# Beyond these, a tensor is in trouble: see docs/metrics.md for what is healthy.
TROUBLE = {
    "saturation_pct": lambda value: value > 0.1,
    "lost_energy_pct": lambda value: value > 0.1,
    "p5_col_sqnr_db": lambda value: value < 20.0,
    "p5_row_sqnr_db": lambda value: value < 20.0,
    "sqnr_db": lambda value: value < 22.0,
    "gain": lambda value: abs(value - 1.0) > 0.03,
}


def by_hand(seen, recipes=RECIPES, steps=None, named=lambda step, site: site):
    """recipe -> (step, site) -> statistics, in these steps or all; `named` gives a site's name in the run."""
    tables = {recipe: seen.case.rows_by_hand(recipe=recipe) for recipe in recipes}
    return {
        recipe: {(step, named(step, site)): row for (step, site), row in table.items() if not steps or step in steps}
        for recipe, table in tables.items()
    }


def check_recipes(seen, want):
    """The run of every recipe but the one whose rows are the program's own says what is computed of it by hand."""
    own, *others = want
    assert {path.name for path in (seen.case.run().path / "what_if").iterdir()} == set(others)
    assert seen.case.run().meta["judged_by"] == own
    for recipe in others:
        assert want[recipe].keys() == want[own].keys()
        run = seen.case.run(recipe=recipe)
        assert (run.meta["variant"], run.meta["what_if"]) == (recipe, True)
        found = differences(seen.case.rows(recipe=recipe), want[recipe])
        assert not found, "\n".join([recipe, *found[:8]])


def check_ranked(seen, want):
    """The tables of the report have recipes, and tensors by what `current` does to them, as the numbers by hand do."""
    tables = {recipe: of_sites(table) for recipe, table in want.items()}
    troubles = {recipe: {site for site in its if in_trouble(its[site])} for recipe, its in tables.items()}
    db = {recipe: {site: row["sqnr_db"] for site, row in its.items()} for recipe, its in tables.items()}
    recipes, tensors = read(plain(readiness(seen.case.run()), top=len(tables["current"])))
    assert list(recipes) == list(want)
    for recipe, (sites, trouble, median) in recipes.items():
        assert (int(sites), int(trouble)) == (len(tables[recipe]), len(troubles[recipe])), recipe
        assert number(median) == pytest.approx(statistics.median(db[recipe].values()), abs=ROUNDED), recipe
    assert tensors.keys() == tables["current"].keys()
    for site, cells in tensors.items():
        *each, best = cells
        for recipe, cell in zip(want, each, strict=True):
            assert number(cell.rstrip("!")) == pytest.approx(db[recipe][site], abs=ROUNDED), (site, recipe)
            assert cell.endswith("!") == (site in troubles[recipe]), (site, recipe)
        healthy = {recipe: db[recipe][site] for recipe in want if site not in troubles[recipe]}
        assert best in {simplest(healthy, NEAR + off) for off in (-0.003, 0.0, 0.003)}, site
    assert not troubles["current"]  # or they come first
    assert [db["current"][site] for site in tensors] == pytest.approx(sorted(db["current"].values()), abs=0.003)
    return {recipe: len(sites) for recipe, sites in troubles.items()}


def of_sites(table):
    """site -> the median of each statistic over the second half of its steps."""
    steps = {site: sorted(step for step, each in table if each == site) for _, site in table}
    taken = {site: its[len(its) // 2 :] for site, its in steps.items()}
    return {
        site: {name: statistics.median(table[step, site][name] for step in its) for name in TROUBLE}
        for site, its in taken.items()
    }


def in_trouble(row):
    return any(beyond(row[name]) for name, beyond in TROUBLE.items())


def simplest(healthy, near):
    return next((recipe for recipe, value in healthy.items() if value >= max(healthy.values()) - near), "none")


def check_printed(seen):
    """`narrowgauge report` prints the same tables, with as many tensors as a terminal has room for."""
    run = seen.case.run()
    done = CliRunner().invoke(report_command, [str(run.path)])
    assert done.exit_code == 0, done.output
    assert plain(readiness(run)) in done.output


def read(said):
    """recipe -> its sites, those in trouble, median; tensor -> the cells of its row."""
    lines = [line.split() for line in said.splitlines()]
    recipes = {words[0]: words[1:4] for words in lines if words and words[0] in RECIPES}
    tensors = {words[0]: words[1:] for words in lines if len(words) == 2 + len(recipes) and ":" in words[0]}
    return recipes, tensors


def number(cell):
    return math.inf if cell == "exact" else float(cell)
