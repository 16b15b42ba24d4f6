"""Terminal, plain text and number formats."""

from __future__ import annotations

import doctest
import importlib
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from rich.console import Console

from narrowgauge.observe.report import conversion, plain, render, text, words
from narrowgauge.observe.report import text as text_of
from narrowgauge.observe.report.headline import headline, speed_line
from narrowgauge.observe.report.summary import gap_note, summary
from narrowgauge.observe.report.text import number
from narrowgauge.observe.store import open_run


@pytest.mark.parametrize("name", ["report.words", "report.facts", "figures.frame", "figures.heatmap"])
def test_doctests(name: str):
    ran = doctest.testmod(importlib.import_module(f"narrowgauge.observe.{name}"))
    assert ran.attempted
    assert not ran.failed


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "—"),
        (0.0, "0.000 %"),
        (0.25, "+0.25 %"),
        (-0.004, "−0.004 %"),
        (99.96, "+100 %"),
        (math.nan, "not finite"),
        (9.996, "+10.0 %"),
        (1234.5, "+1,234 %"),
    ],
)
def test_percent(value, shown):
    assert words.percent(value) == shown


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("No such file: /home/ada/data/a.txt", "No such file: …/a.txt"),
        ("~/runs/x/y.pt is broken", "…/y.pt is broken"),
        (r"C:\Users\ada\y.pt is broken", "…/y.pt is broken"),
        ("3 tokens/s and 1/2, https://example.org/a/b stay", "3 tokens/s and 1/2, https://example.org/a/b stay"),
        ("layers/0/up stays", "layers/0/up stays"),
    ],
)
def test_paths_are_scrubbed(given: str, left: str):
    assert words.scrub(given) == left


def said(verdict) -> str:
    return "".join(part for part, _ in headline(verdict))


def test_headlines():
    three = synthetic.verdict()
    assert said(three) == "blockwise is safe; delayed is not; current is undecided."
    current, delayed, blockwise = three.variants
    assert said(synthetic.verdict(variants=(delayed,))) == "delayed is not safe."
    assert said(synthetic.verdict(variants=(blockwise, synthetic.variant("rowwise", safe="yes")))) == (
        "blockwise and rowwise are safe."
    )
    assert said(synthetic.verdict(judged=False)) == "Nothing was judged."
    assert said(synthetic.verdict(variants=())) == "No FP8 variant was run."
    assert gap_note(current) == "inside the noise band"
    assert (
        gap_note(synthetic.variant("x", gap_pct=0.1, band_pct=None, outcome="pass")) == "chance unknown: no noise twin"
    )


def test_speed_is_never_judged_where_it_was_emulated():
    fast = synthetic.variant("current", worth_it="yes", speedup=1.31)
    assert "emulated" in speed_line(synthetic.verdict(variants=(fast,)))
    assert (
        speed_line(synthetic.verdict(emulated=False, variants=(fast,)))
        == "Worth it: current (1.31× the baseline's speed)."
    )
    slow = synthetic.variant("current", worth_it="no", speedup=0.9)
    assert speed_line(synthetic.verdict(emulated=False, variants=(slow,))).startswith("None is worth it here")
    unsafe = synthetic.variant("delayed", worth_it="no")
    assert speed_line(synthetic.verdict(variants=(unsafe,))) == (
        "None is worth it here: none is safe. FP8 products were emulated on this machine, so their speed says nothing."
    )
    assert "is not known" in speed_line(synthetic.verdict(variants=(unsafe, synthetic.variant("current"))))
    cells = [
        row.cells[-1] for block in summary(synthetic.verdict()).blocks for row in block.rows if row.label == "Step time"
    ]
    assert cells[0].note == "emulated, no speed verdict"


@pytest.mark.parametrize("counted", ["tokens", "samples"])
def test_speed_is_of_what_the_baseline_counted(counted):
    baseline = replace(synthetic.verdict().baseline, counted=counted)
    labels = [row.label for block in summary(synthetic.verdict(baseline=baseline)).blocks for row in block.rows]
    assert [each for each in labels if each.endswith("per second")] == [f"{counted.capitalize()} per second"]


def test_terminal_is_plain_without_a_tty():
    shown = plain(synthetic.verdict())
    assert "\x1b" not in shown
    for word in (
        "✕ fail",
        "safe: no",
        "+1.37%",
        "Next: Use current scaling",
        "n*  emulated, no speed verdict",
        "note: The program calls torch.compile",
    ):
        assert word in shown


def test_the_table_of_five_runs_fits_eighty_columns():
    variants = tuple(synthetic.variant(name) for name in ("current", "delayed", "blockwise"))
    lines = plain(synthetic.verdict(variants=variants), width=80).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "blockwise" in line and "baseline" in line) :]
    assert table[0].split() == ["baseline", "noise", "current", "delayed", "blockwise"]
    assert not any("…" in line for line in table)
    for label in ("Loss gap", "Loss at same weights", "Gradient at same weights", "Peak memory"):
        [row] = [line for line in table if line.startswith(f"  {label}")]
        assert len(row) <= 80
        assert len(row.removeprefix(f"  {label}").split()) >= 3  # not folded


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_too_wide_is_cut_between_variants(width):
    names = ("current", "delayed", "blockwise", "rowwise", "mxfp8")
    variants = tuple(synthetic.variant(name, gap_pct=1.743e8, speedup=None) for name in names)
    lines = plain(synthetic.verdict(variants=variants), width=width).splitlines()
    heads = [line.split() for line in lines if line.split()[:2] == ["baseline", "noise"]]
    assert [name for head in heads for name in head[2:]] == list(names)
    assert len(heads) == {60: 5, 80: 2, 120: 1}[width]
    assert sum("+1.7e8%" in line for line in lines) == len(heads)
    assert not any("…" in line or len(line) > width for line in lines)


def test_why_nothing_was_judged_is_said_once():
    why = "Not judged: from step 3 on the noise run saw other data than the baseline."
    two = tuple(synthetic.variant(name, outcome="unjudged", sentence=why, next_step="Do it.") for name in "ab")
    shown = plain(synthetic.verdict(judged=False, why_not=why, variants=two))
    assert shown.count("From step 3 on") == shown.count("Do it.") == 1


def test_a_mark_in_the_table_is_explained():
    inside = synthetic.variant("current", outcome="inconclusive", gap_pct=-0.4, band_pct=2.0)
    shown = plain(synthetic.verdict(variants=(inside,)), width=80)
    assert "(−0.40%)" in shown
    assert "(n)  inside the noise band" in shown


def test_terminal_prints_markup_as_text():
    odd = synthetic.variant("current", sentence="[bold red]not markup[/] in /home/ada/x/y.py", worst=())
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True).print(render(synthetic.verdict(variants=(odd,))))
    assert "[bold red]not markup[/] in …/y.py" in out.getvalue()


def test_text_has_full_precision(synthetic_runs):
    run = synthetic_runs["delayed"]
    shown = text_of(run)
    losses = run.scalars("loss")["loss"]
    for step in (1, 150, 300):
        assert f"step {step}\n" in shown
        assert f"  loss {losses[step - 1].item()!r}\n" in shown
    _, values = run.series(f"{synthetic.SICK}:grad_output", "lost_energy_pct")
    assert f"lost_energy_pct {values[-1].item()!r}" in shown
    assert "numel 5636096 " in shown
    assert "command train.py --steps 300 --size demo" in shown


def test_text_of_a_sick_and_of_an_empty_run(tmp_path: Path):
    run = open_run(synthetic.write_run(tmp_path / "a", "baseline", loss=np.array([2.0, np.nan])))
    assert "step 2\n" in text(run)
    assert "  loss nan\n" in text(run)
    assert "  nan: loss is not finite" in text(run)
    empty = open_run(synthetic.write_run(tmp_path / "b", "baseline", loss=np.zeros(0)))
    assert text(empty).endswith("nothing was recorded")


@pytest.mark.parametrize("value", [0.1, 1e-7, 1 / 3, 1e300, -0.0])
def test_numbers_read_back_the_same(value: float):
    assert float(number(np.float64(value))) == value


def test_histograms_in_text_are_cut_to_what_they_hold():
    assert number(np.array([0, 0, 3, 0, 5, 0])) == "2:[3 0 5]"
    assert number(np.zeros(4)) == "[]"
    assert number(float("nan")) == ""


def test_conversion_lines_join_equal_blocks():
    rows = synthetic.conversion(synthetic.modules(), "current", 300)
    lines = conversion.lines(rows)
    assert [line.name for line in lines][:2] == ["layers.0–3.attn.q", "layers.0–3.attn.k"]
    assert lines[0].layers == 4
    assert [line.name for line in lines if line.never_called] == ["adapter"]
    assert [line.name for line in lines if not line.runs_in] == ["lm_head"]
    assert sum(line.layers for line in lines) == len(rows)
    assert conversion.lines([]) == ()
    stages = [{"name": f"layers.{n}", "of_ranks": [rank]} for rank in (0, 1) for n in (0, 1)]
    assert [line.name for line in conversion.lines(stages)] == ["layers.0–1 (rank 0)", "layers.0–1 (rank 1)"]
    assert conversion.lines([{"name": "fc"}])[0].share == "—"
