"""What other recipes would make of a program's tensors: counted as by hand, in runs of their own, changing nothing."""

import json
import math
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.session import programs
from tests.session.dumps.test_dumper import first_step
from tests.session.test_watch import PLAIN

import narrowgauge as ng
from narrowgauge.cli.report import report_command
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.recipes import CATALOG, DELAYED, STATIC, by_name
from narrowgauge.observe.report.readiness import Asked, Readiness, in_short, plain, readiness
from narrowgauge.observe.report.together import LeftOut, together
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.session.attach import Session
from narrowgauge.session.config import Config
from narrowgauge.session.config.tables import STATELESS
from narrowgauge.session.judge import Judge
from narrowgauge.session.plan import Plan
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.selection.selection import Selection
from narrowgauge.session.what_if import WhatIf, judge_of


def follow(folder, program=programs.BASIC, steps="3", **plan):
    """The facts of a program's run in FOLDER/out."""
    script = folder / "train.py"
    script.write_text(program)
    plan = Plan("x", str(folder / "out"), ("train.py",), every=1, **plan)
    writer = RunWriter(plan.folder, {})
    session = Session(plan, writer)
    kept, sys.argv = sys.argv, ["train.py", steps]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = kept
        session.finish()
        facts = session.facts()
        writer.update_meta(**facts)
        writer.close()
    return facts


def rows(run, step=1):
    table = run.tensors(steps=[step])
    return {site: {name: table[name][i] for name in table.columns} for i, site in enumerate(table["site"])}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    facts = follow(folder, judge="current", what_if=("blockwise", "delayed", "mxfp8"))
    return folder / "out", facts


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_the_numbers_are_those_of_the_same_tensors_quantized_by_hand(asked, recipe):
    found = rows(open_run(asked[0] / "what_if" / recipe))
    assert sorted(found) == sorted(rows(open_run(asked[0])))
    for site, tensors in first_step().items():
        rule = by_name(recipe).uses(site.partition(":")[2])[0]
        x = torch.cat(tensors)
        d = [ng.quantize(t, rule.fmt, rule.granularity, scaling=rule.scaling).dequantize() for t in tensors]
        xx, ee = x.double().square().sum(), (x.double() - torch.cat(d).double()).square().sum()
        assert found[site]["numel"] == x.numel()
        assert found[site]["sqnr_db"] == pytest.approx(float(10 * torch.log10(xx / ee)), rel=1e-6), site


def test_a_delayed_scale_is_of_the_steps_before(asked):
    current, delayed = open_run(asked[0]), open_run(asked[0] / "what_if" / "delayed")
    amax = {step: {site: row["amax"] for site, row in rows(current, step).items()} for step in (1, 2, 3)}
    for site, row in rows(delayed, 3).items():
        assumed = max(amax[1][site], amax[2][site])
        fmt = by_name("delayed").uses(site.partition(":")[2])[0].fmt
        assert row["scale_max"] == pytest.approx(assumed / fmt.max, rel=1e-6), site
        assert row["amax_ratio"] == pytest.approx(amax[3][site] / assumed, rel=1e-6), site


def looked_at(folder, recipe, *steps):
    """The rows by step of one weight, that came as these tensors: of each step a list."""
    with RunWriter(folder / "out", {}) as writer:
        asked = WhatIf((recipe,), writer, Selection({}, 1))
        for step, tensors in enumerate(steps, 1):
            asked.begin_step(step, recorded=True)
            for x in tensors:
                asked.operand("a", "input", x)
        asked.close()
    run = open_run(folder / "out" / "what_if" / recipe)
    return {step: rows(run, step)["a:input"] for step in run.steps.tolist()}


@pytest.mark.parametrize("recipe", ["delayed", "static"])
@pytest.mark.parametrize("first", [0.0, math.nan, math.inf])
def test_what_says_nothing_of_a_scale_is_not_assumed(tmp_path, recipe, first):
    # LoRA's B and the gradient of its A begin as zeros; the first steps under a gradient scaler overflow.
    x = torch.full((16, 16), 1e-4)
    found = looked_at(tmp_path, recipe, [torch.full((16, 16), first)], [x], [4 * x])
    assert math.isnan(found[1]["amax_ratio"])
    assert (found[2]["amax_ratio"], found[2]["underflow_pct"], found[2]["gain"]) == (1, 0, pytest.approx(1))
    assert found[3]["scale_max"] == pytest.approx(1e-4 / 448, rel=1e-6)
    assert (found[3]["amax_ratio"], found[3]["saturation_pct"]) == (pytest.approx(4), 100)


@pytest.mark.parametrize("recipe", ["delayed", "static"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_assumed_scale_hides_no_inf_and_no_nan(tmp_path, recipe, bad):
    x = torch.randn(16, 16)
    spoiled = x.clone()
    spoiled[3, 4] = bad
    found = looked_at(tmp_path, recipe, [x], [spoiled], [spoiled, x / 2])
    assert math.isnan(found[2]["sqnr_db"])
    assert math.isnan(found[2]["scale_max"])
    assert math.isnan(found[2]["amax_ratio"])
    assert found[3]["amax_ratio"] == pytest.approx(0.5)
    assert found[3]["sqnr_db"] > 25


def test_the_first_tensor_s_scale_is_that_of_all_of_its_step_as_where_the_recipe_trains(tmp_path):
    x = torch.full((16, 16), 1.0)
    found = looked_at(tmp_path, "delayed", [0 * x, x, 4 * x], [x])
    assert (found[1]["amax_ratio"], found[1]["scale_max"]) == (4, pytest.approx(1 / 448))
    assert (found[2]["amax_ratio"], found[2]["scale_max"]) == (0.25, pytest.approx(4 / 448))


@pytest.mark.parametrize("recipe", [replace(DELAYED, history=2), DELAYED, STATIC], ids=["short", "delayed", "static"])
def test_the_scale_that_is_assumed_is_the_one_that_training_has(recipe):
    """Also behind steps that were zeros, or not finite: these took a place in what is remembered."""
    judge = Judge(recipe, SimpleNamespace(end_step=lambda: None))
    table = ScaleTable()
    row, operand = table.add("a", recipe), recipe.uses("input")[0]
    nan, inf = math.nan, math.inf
    for step in (
        (0, nan),
        (2, 8),
        (inf,),
        (4, nan),
        (nan, inf),
        (1,),
        (0,),
        (nan,),
        (0.5, 1),
        (0.5,),
        (nan, 0.25),
        (1,),
    ):
        for amax in step:
            x = torch.full((2, 16), float(amax))
            scale, _ = table.scale_of(row, operand, x.amax(), write=True)
            table.record(row, x.amax())
            q, _ = judge.quantized("a:input", "input", x)
            assert q.scale == scale or not math.isfinite(amax), step
        table.roll()
        judge.end_step()


@pytest.mark.parametrize("thrown_away", ["drop_step", "begin_anew"])
def test_amaxes_of_a_step_that_was_none_are_no_history(tmp_path, thrown_away):
    x = torch.full((16, 16), 1.0)
    with RunWriter(tmp_path / "out", {}) as writer:
        asked = WhatIf(("delayed",), writer, Selection({}, 1))
        for step, size in enumerate((1, 9, 1, 1)):
            asked.begin_step(step, recorded=True)
            asked.operand("a", "input", size * x)
            if size == 9:
                getattr(asked, thrown_away)()
        asked.close()
    assert rows(open_run(tmp_path / "out" / "what_if" / "delayed"), 3)["a:input"]["amax_ratio"] == 1


EXPERTS = """
import torch
from torch import nn
torch.manual_seed(0)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 24, 32) * torch.tensor([1.0, 300.0, 0.01]).view(3, 1, 1))
    def forward(self, x):
        return torch.bmm(x, self.up.mT)
model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(2):
    model(torch.ones(3, 4, 32)).square().mean().backward()
    with torch.no_grad():
        model.up[1] *= 2
    optimizer.step()
kept = model.up.detach()
"""


@pytest.mark.parametrize("judge", ["current", "blockwise"])
def test_experts_in_one_parameter_are_scaled_each_for_itself_by_every_recipe(tmp_path, judge):
    others = [name for name in ("current", "rowwise", "blockwise", "mxfp8", "delayed") if name != judge]
    follow(tmp_path, EXPERTS, judge=judge, what_if=tuple(others))
    torch.manual_seed(0)
    w = torch.randn(3, 24, 32) * torch.tensor([1.0, 300.0, 0.01]).view(3, 1, 1)
    for name in others:
        rule = by_name(name).uses("weight")[0]
        each = [ng.quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling).dequantize() for x in w]
        xx, ee = w.double().square().sum(), (w.double() - torch.stack(each).double()).square().sum()
        row = rows(open_run(tmp_path / "out" / "what_if" / name))["up:weight"]
        assert row["numel"] == w.numel()
        assert row["sqnr_db"] == pytest.approx(float(10 * torch.log10(xx / ee)), rel=1e-6), name
        assert row["scale_max"] > 1000 * row["scale_min"], name
    delayed = rows(open_run(tmp_path / "out" / "what_if" / "delayed"), 2)["up:weight"]
    assert delayed["amax_ratio"] == 2.0  # of the one expert that grew
    assert delayed["scale_min"] == pytest.approx(float(w[2].abs().max()) / 448, rel=1e-6)


def test_experts_are_asked_about_under_the_programs_autocast_as_well(tmp_path):
    called = "model(torch.ones(3, 4, 32))"
    program = EXPERTS.replace(f"    {called}", f"    with torch.autocast('cpu'):\n        y = {called}\n    y")
    facts = follow(tmp_path, program, judge="current", what_if=("blockwise",), seldom=True)  # of 24 rows to an expert
    assert facts["unmet"] == []
    rule = by_name("blockwise").uses("weight")[0]
    torch.manual_seed(0)
    w = torch.randn(3, 24, 32) * torch.tensor([1.0, 300.0, 0.01]).view(3, 1, 1)
    each = torch.stack([ng.quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling).dequantize() for x in w])
    xx, ee = w.double().square().sum(), (w.double() - each.double()).square().sum()
    row = rows(open_run(tmp_path / "out" / "what_if" / "blockwise"))["up:weight"]
    assert row["sqnr_db"] == pytest.approx(float(10 * torch.log10(xx / ee)), rel=1e-6)


PICTURES = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(4, 3, 4, 4)).square().mean().backward()
    optimizer.step()
"""


def test_rows_shorter_than_any_fp8_product_takes_are_not_asked_about(tmp_path):
    """A pixel of three colours, a gradient with one column: a scale each, and nothing that would be lost."""
    follow(tmp_path, PICTURES, judge="current", what_if=("rowwise",))
    own, asked = rows(open_run(tmp_path / "out")), rows(open_run(tmp_path / "out" / "what_if" / "rowwise"))
    assert set(own) - set(asked) == {"0:input", "2:grad_output"}
    assert {"0:weight", "0:grad_output", "2:input", "2:weight"} <= set(asked)
    assert max(row["sqnr_db"] for row in asked.values()) < 60


def test_training_is_what_it_was_and_the_cost_is_told(asked, tmp_path):
    follow(tmp_path, judge="current")
    alone, beside = open_run(tmp_path / "out").scalars("loss"), open_run(asked[0]).scalars("loss")
    assert np.array_equal(alone["loss"], beside["loss"])
    assert not (tmp_path / "out" / "what_if").exists()
    told = asked[1]["watch"]["what_if"]
    assert told["recipes"] == ["blockwise", "delayed", "mxfp8"]
    assert told["seconds"] > 0
    assert asked[1]["unmet"] == []


def test_a_selection_holds_for_every_recipe(tmp_path):
    follow(tmp_path, judge="current", what_if=("blockwise",), watch={"sites": ["2:input"], "metrics": ["sqnr_db"]})
    table = open_run(tmp_path / "out" / "what_if" / "blockwise").tensors()
    assert set(table["site"]) == {"2:input"}
    assert "amax" not in table.columns


def test_a_folder_in_the_way_is_told_and_training_goes_on(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "what_if").write_text("")
    facts = follow(tmp_path, judge="current", what_if=("blockwise",))
    assert facts["steps"] == 3
    assert facts["unmet"][0].startswith("watch.what_if: it ended early, and rows of it are missing: ")
    assert len(open_run(tmp_path / "out").tensors()["step"]) > 0


def test_the_runs_own_rows_are_by_a_recipe_without_state():
    assert [judge_of(names) for names in ([], ["current"], ["delayed", "rowwise"], ["delayed"])] == [
        "", "current", "rowwise", "current",
    ]  # fmt: skip


def test_the_recipes_of_a_file_reach_the_plan():
    settings = Config.model_validate({"watch": {"what_if": ["delayed", "rowwise", "blockwise", "rowwise"]}})
    found = settings.for_watching("blockwise")
    assert (found["judge"], found["what_if"]) == ("rowwise", ("delayed",))
    assert "seldom" not in found


def test_without_a_file_all_stateless_recipes_are_asked_now_and_then_unless_something_is_converted():
    assert {name for name, recipe in CATALOG.items() if recipe.state == "none"} == set(STATELESS)
    plain, converted = Config().for_watching(), Config().for_watching("rowwise")
    assert (plain["judge"], plain["what_if"]) == ("current", ("rowwise", "blockwise", "mxfp8", "mxfp8-ocp"))
    assert plain["seldom"]
    assert (converted["judge"], converted["what_if"]) == ("rowwise", ())
    for none in ([], ["current"]):
        assert Config.model_validate({"watch": {"what_if": none}}).for_watching()["what_if"] == ()


def test_readiness_ranks_recipes_and_tensors(tmp_path):
    program = programs.BASIC.replace("x = torch.randn(24, 32, generator=data)",
                                     "x = torch.randn(24, 32, generator=data); x[0, 0] = 1e6")  # fmt: skip
    follow(tmp_path, program, judge="current", what_if=("mxfp8",))
    found = readiness(open_run(tmp_path / "out"))
    current, mx = found.recipes
    assert (current.name, mx.name) == ("current", "mxfp8")
    assert (current.sites, mx.sites) == (9, 9)
    assert current.trouble > mx.trouble
    worst = found.tensors[0]
    assert worst.trouble["current"]
    assert worst.site == current.worst[0].site
    assert next(t for t in found.tensors if t.site == "0:weight").best == "current"
    page = plain(found)
    assert page.startswith("What each recipe would do to this run's tensors (steps 2 and 3)\nrecipe")
    assert f"{worst.sqnr_db['current']:.1f}!" in page
    assert in_short(found) in page


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"a": 0, "b": 0, "c": 0}, "No tensor is in trouble under a, b and c."),
        ({"a": 0, "b": 2}, "No tensor is in trouble under a. In trouble: 2 of 9 under b."),
        ({"a": 1, "b": 2}, "In trouble: 1 of 9 under a and 2 of 9 under b."),
    ],
)
def test_which_recipes_are_without_trouble_in_short(trouble, said):
    recipes = tuple(Asked(name, 9, count, 30.0, ()) for name, count in trouble.items())
    assert in_short(Readiness(recipes, (), (1,))) == said


def test_the_report_has_the_ranking_on_the_terminal_and_on_the_page(asked, tmp_path):
    page = tmp_path / "page.html"
    done = CliRunner().invoke(report_command, [str(asked[0]), "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert "What each recipe would do to this run's tensors" in done.output
    assert "FP8 readiness" in page.read_text()
    for name in ("current", "blockwise", "delayed", "mxfp8"):
        assert name in done.output
        assert f'<th scope="col">{name}</th>' in page.read_text()


def test_a_run_that_asked_one_recipe_has_no_readiness(tmp_path):
    follow(tmp_path, judge="current")
    assert readiness(open_run(tmp_path / "out")) is None


@pytest.mark.parametrize("damage", [lambda file: file.write_text("{"), Path.unlink])
def test_a_recipe_whose_run_is_damaged_is_named_in_one_line(tmp_path, damage):
    follow(tmp_path, judge="current", what_if=("blockwise", "mxfp8"))
    damage(tmp_path / "out" / "what_if" / "mxfp8" / "run.json")
    done = CliRunner().invoke(report_command, [str(tmp_path / "out"), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    (told,) = done.stderr.splitlines()
    assert told.startswith("narrowgauge: FP8 readiness goes on without mxfp8: ")
    assert "what_if/mxfp8" in told
    assert [asked in done.stdout for asked in ("current", "blockwise", "mxfp8")] == [True, True, False]


def test_a_run_that_was_killed_before_any_row_was_written_has_no_readiness_and_a_report(tmp_path):
    folder = tmp_path / "out"
    for of, by in ((folder, "current"), (folder / "what_if" / "mxfp8", "mxfp8")):
        RunWriter(of, {"judged_by": by}).close("failed")
    assert readiness(open_run(folder)) is None
    done = CliRunner().invoke(report_command, [str(folder), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output


OTHERS = ("rowwise", "blockwise", "mxfp8", "mxfp8-ocp")
SELDOM = {"judge": "current", "what_if": OTHERS, "seldom": True}


def steps_of(run):
    return sorted(set(run.tensors()["step"].tolist()))


def test_where_nobody_asked_few_steps_are_looked_at_with_the_same_numbers(asked, tmp_path):
    facts = follow(tmp_path, steps="5", **SELDOM)
    assert (facts["unmet"], facts["watch"]["what_if"]["recipes"]) == ([], list(OTHERS))
    own = open_run(tmp_path / "out")
    assert steps_of(own) == [1, 2, 3, 4, 5]
    for name in OTHERS:
        beside = open_run(tmp_path / "out" / "what_if" / name)
        assert (steps_of(beside), beside.sites) == ([1, 4], own.sites)
    every = rows(open_run(asked[0] / "what_if" / "mxfp8"))
    few = rows(open_run(tmp_path / "out" / "what_if" / "mxfp8"))
    assert {site: row["sqnr_db"] for site, row in few.items()} == {site: row["sqnr_db"] for site, row in every.items()}


def test_a_ranking_compares_recipes_in_the_steps_that_all_of_them_saw(tmp_path):
    program = programs.BASIC.replace(
        "x = torch.randn(24, 32, generator=data)",
        "x = torch.randn(24, 32, generator=data)\n        if step == 4: x[0, 0] = 1e6",  # its fifth, which one sees
    )
    assert program != programs.BASIC
    follow(tmp_path, program, steps="5", **SELDOM)
    run = open_run(tmp_path / "out")
    found = readiness(run)
    assert found.steps == (4,)
    sqnr = {site: row["sqnr_db"] for site, row in rows(run, 4).items()}
    assert {tensor.site: tensor.sqnr_db["current"] for tensor in found.tensors} == sqnr
    assert plain(found).startswith("What each recipe would do to this run's tensors (step 4)\n")


CONVERTS = """
import torch
from torch import nn
import narrowgauge as ng
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
ng.convert(model, "blockwise", only=["0"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("seldom", [True, False])
def test_layers_that_somebody_converted_are_looked_at_where_somebody_asked(tmp_path, seldom):
    follow(tmp_path, CONVERTS, judge="current", what_if=("rowwise",), seldom=seldom)
    run = open_run(tmp_path / "out")
    plain_ones = {f"2:{role}" for role in ("input", "weight", "grad_output")}
    converted = {site.replace("2", "0") for site in plain_ones}
    assert plain_ones | converted < set(run.sites)
    assert set(open_run(tmp_path / "out" / "what_if" / "rowwise").sites) == plain_ones | (
        set() if seldom else converted
    )
    assert {tensor.site for tensor in readiness(run).tensors} == plain_ones | (set() if seldom else converted)


@pytest.mark.parametrize(("seldom", "room"), [(True, "room"), (False, None)])
def test_kernels_that_quantize_count_as_ever_where_nobody_asked(tmp_path, monkeypatch, seldom, room):
    monkeypatch.setattr(Collector, "look", lambda *args: "room")
    plan = Plan("x", str(tmp_path), ("train.py",), every=1, judge="current", what_if=("rowwise",), seldom=seldom)
    with RunWriter(tmp_path / "out", {}) as writer:
        recorder = Recorder(plan, writer)
        assert recorder.begin_step(1)
        assert recorder.what_if._open
        assert recorder.look("0", "input", torch.ones(16, 16), by_name("current").uses("input")[0], False) == room


IN_TURN = """
import torch
from torch import nn
torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(32, 32)) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for step in range(6):
    models[step % 2](torch.randn(16, 32)).square().mean().backward()
    optimizers[step % 2].step()
"""


@pytest.mark.parametrize("seldom", [True, False])
def test_on_a_gpu_nothing_is_quantized_to_be_counted_where_nobody_asked(tmp_path, monkeypatch, seldom):
    made = []
    monkeypatch.setattr(Judge, "counted", lambda self, *args: self.recipe.name == "rowwise")
    monkeypatch.setattr(Judge, "quantized", lambda self, *args: made.append(self.recipe.name) or (None, None))
    monkeypatch.setattr(Collector, "operand", lambda *args, **kwargs: None)
    with RunWriter(tmp_path / "out", {}) as writer:
        selection = Selection({}, 1)
        asked = WhatIf(("rowwise", "mxfp8"), writer, selection, seldom=seldom)
        asked.begin_step(1, selection.due(1))
        asked.operand("0", "input", torch.ones(16, 16))
        asked.operand("1", "input", torch.ones(16, 16, device="meta"))
        assert (made, asked.problem) == (["mxfp8"] * (1 if seldom else 2), "")
        room = {torch.device("meta"): None}
        for collector in asked.collectors.values():
            collector._looks = dict(room)
        asked.end_step()
        assert [collector._looks for collector in asked.collectors.values()] == [{} if seldom else room] * 2


def test_all_recipes_are_written_at_once_in_the_end(tmp_path, monkeypatch):
    asked, end, close = [], RunWriter.end, RunWriter.close
    monkeypatch.setattr(RunWriter, "end", lambda self, *args: asked.append(f"end {self.path.name}") or end(self, *args))
    monkeypatch.setattr(RunWriter, "close", lambda *args, **how: asked.append("wait") or close(*args, **how))
    follow(tmp_path, judge="current", what_if=("rowwise", "mxfp8"))
    assert asked[:3] == ["end rowwise", "end mxfp8", "wait"]


def test_a_ranking_says_of_each_recipe_what_its_worst_tensor_is(asked):
    found = readiness(open_run(asked[0]))
    blockwise, delayed = (
        next(each for each in found.recipes if each.name == name) for name in ("blockwise", "delayed")
    )
    worst = min(found.tensors, key=lambda tensor: tensor.sqnr_db["blockwise"])
    assert blockwise.said == f"{worst.site}: {worst.sqnr_db['blockwise']:.1f} dB"
    assert delayed.said == f"{delayed.worst[0].site}: {delayed.worst[0].why}"


@pytest.mark.parametrize(("watch", "steps"), [({}, [1, 2, 4, 5, 6]), ({"steps": [[3, 4]]}, [3, 4])])
def test_optimizers_that_take_turns_have_all_their_tensors_in_the_ranking(tmp_path, watch, steps):
    follow(tmp_path, IN_TURN, watch=watch, **SELDOM)
    run = open_run(tmp_path / "out")
    assert steps_of(open_run(tmp_path / "out" / "what_if" / "rowwise")) == steps
    found = readiness(run)
    assert {tensor.site for tensor in found.tensors} == set(run.sites)
    assert len(run.sites) == 6
    assert all(len(tensor.sqnr_db) == 5 for tensor in found.tensors)


LATE = """
import torch
from torch import nn
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.late = None
    def forward(self, x, step):
        x = self.experts[0 if step < 5 else step % 3](self.stem(x))
        return x if self.late is None else self.late(x)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 13):
    if step == 9:
        model.late = nn.Linear(32, 32)
        optimizer.add_param_group({"params": list(model.late.parameters())})
    for _ in range(2):
        model(torch.randn(16, 8), step).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_tensor_that_was_in_no_such_step_is_asked_about_where_it_is_first_recorded(tmp_path):
    """An expert that runs in some steps, and a layer that comes into the model late: of each all microbatches."""
    follow(tmp_path, LATE, **SELDOM)
    run, beside = (open_run(tmp_path / "out" / folder) for folder in ("", "what_if/mxfp8"))
    asked = {"stem": [1, 4], "experts.0": [1, 4], "experts.2": [5], "experts.1": [7], "late": [9]}
    for layer, steps in asked.items():
        assert beside.series(f"{layer}:grad_output", "sqnr_db")[0].tolist() == steps, layer
        (own,) = (run.tensors("numel", f"{layer}:input", step)["numel"][0] for step in steps[-1:])
        if layer != "stem":
            assert beside.tensors("numel", f"{layer}:input", steps[-1])["numel"].tolist() == [own] == [2 * 16 * 32]
    found = readiness(run)
    ranked = {tensor.site: tensor for tensor in found.tensors}
    assert set(ranked) == set(run.sites) - {"stem:input", "stem:weight"}
    assert found.steps == (4, 5, 7, 9)
    sqnr = dict(zip(*map(np.ndarray.tolist, run.series("late:weight", "sqnr_db")), strict=True))
    assert ranked["late:weight"].sqnr_db["current"] == sqnr[9]
    assert found.without == LeftOut(unasked=("stem:input", "stem:weight"))


def test_what_was_begun_and_thrown_away_is_asked_about_again(tmp_path):
    with RunWriter(tmp_path / "out", {}) as writer:
        asked = WhatIf(("rowwise",), writer, Selection({}, 1), seldom=True)

        def see(step, *sites):
            asked.begin_step(step, recorded=True)
            for site in sites:
                asked.operand(site, "weight", torch.randn(16, 16))

        see(1, "a")
        asked.drop_step()
        see(2, "a", "b")
        asked.begin_anew()
        asked.operand("a", "weight", torch.randn(16, 16))
        see(3, "a", "b")
        see(4, "a", "b")
        asked.close()
    rows = open_run(tmp_path / "out" / "what_if" / "rowwise").tensors()
    assert list(zip(rows["step"].tolist(), rows["site"], strict=True)) == [(2, "a:weight"), (3, "b:weight")]


@pytest.mark.parametrize("seldom", [False, True])
def test_a_weight_of_a_step_that_was_none_is_looked_at_in_the_next(tmp_path, seldom):
    with RunWriter(tmp_path / "out", {}) as writer:
        asked = WhatIf(("rowwise",), writer, Selection({}, 1), seldom=seldom)
        for step, dropped in ((1, True), (1, False)):
            asked.begin_step(step, recorded=True)
            asked.operand("a", "weight", torch.randn(16, 16))
            if dropped:
                asked.drop_step()
        asked.close()
    rows = open_run(tmp_path / "out" / "what_if" / "rowwise").tensors()
    assert list(zip(rows["step"].tolist(), rows["site"], strict=True)) == [(1, "a:weight")]


BY_HAND = """
import torch

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x

class ByHand(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return Own.apply(x, self.w)

model = torch.nn.Sequential(torch.nn.Linear(16, 16), ByHand())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(16, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_readiness_says_of_which_layers_no_gradient_was_seen(tmp_path):
    facts = follow(tmp_path, program=BY_HAND, **SELDOM)
    assert facts["gradients_not_seen"] == ["1.w"]
    assert any(note.startswith("Gradients not seen: 1.w.") for note in facts["notes"])
    with RunWriter(tmp_path / "told", {}) as writer:
        writer.update_meta(**facts)
        writer.add_tensors(1, ["1.w:input"], {"sqnr_db": [31.0]})
    below = tmp_path / "told" / "what_if" / "rowwise"
    with RunWriter(below, {}) as writer:
        writer.add_tensors(1, ["1.w:input"], {"sqnr_db": [31.0]})
    said = in_short(readiness(open_run(tmp_path / "told")))
    assert said.endswith("Nothing is known of the gradients of 1.w: they were not seen.")


def test_each_tensor_is_ranked_by_its_own_steps_and_what_is_in_none_is_named(tmp_path):
    """Of a run in which recipes were asked in few steps only."""
    steps = {"usual:input": range(8), "early:input": [0], "late:input": [7], "seldom:input": [3, 5], "tiny:input": [0]}
    for folder, sites in (("", steps), ("what_if/mxfp8", list(steps)[:2]), ("what_if/rowwise", list(steps)[:2])):
        with RunWriter(tmp_path / folder, {"judged_by": "current"}) as writer:
            for step in (0, 2, 4, 6) if folder else range(8):
                there = [site for site in sites if step in steps[site]]
                writer.add_tensors(step, there, {"sqnr_db": np.full(len(there), 30.0 + step)})
                if not folder:
                    writer.add_tensors(step, ["usual:output"], {"gemm_gain": np.ones(1)})
    run = open_run(tmp_path)
    assert together([open_run(tmp_path / "what_if" / name) for name in ("mxfp8", "rowwise")]) == {
        "usual:input": (4, 6), "early:input": (0,),
    }  # fmt: skip
    found = readiness(run)
    assert {tensor.site: tensor.sqnr_db["current"] for tensor in found.tensors} == {
        "usual:input": 35.0, "early:input": 30.0,
    }  # fmt: skip
    assert found.steps == (0, 4, 6)
    assert found.without == LeftOut(("late:input", "seldom:input"), ("tiny:input",))
    done = CliRunner().invoke(report_command, [str(tmp_path), "-o", str(tmp_path / "page.html")])
    for said in (
        "2 tensors (late:input and seldom:input) are not in the table: they were in none of the steps in which",
        "tiny:input is not in the table: FP8 products take no rows of fewer than 16 elements",
    ):
        assert said in " ".join(done.output.split())
        assert said in " ".join((tmp_path / "page.html").read_text().split())


def test_what_has_no_sqnr_is_in_the_table_if_something_is_wrong_with_it_and_named_below_it_if_not(tmp_path):
    sites = ["fine:input", "nan:input", "half:input", "dead:grad_output"]
    for folder, sqnr in (("", [30, np.nan, np.nan, np.nan]), ("what_if/mxfp8", [31, np.nan, 31, np.nan])):
        with RunWriter(tmp_path / folder, {"judged_by": "current"}) as writer:
            said = {"sqnr_db": np.array(sqnr, float), "nan_count": np.array([0, 512, 1, 0]), "inf_count": np.zeros(4)}
            writer.add_tensors(1, sites, said)
    found = readiness(open_run(tmp_path))
    assert [(tensor.site, tensor.best) for tensor in found.tensors] == [
        ("nan:input", "none"), ("half:input", "none"), ("fine:input", "current"),
    ]  # fmt: skip
    assert [(asked.trouble, asked.sites) for asked in found.recipes] == [(2, 3), (2, 3)]
    assert found.without == LeftOut(empty=("dead:grad_output",))
    told = "dead:grad_output is not in the table: what was compared of it was zeros alone."
    page = plain(found).splitlines()
    assert told in page
    assert "nan:input   -!       -!     none" in page
    assert "half:input  -!       31.0!  none" in page
    done = CliRunner().invoke(report_command, [str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert told in done.output
    assert told in " ".join((tmp_path / "page.html").read_text().split())


@pytest.mark.parametrize("metrics", [["amax"], ["sqnr_db"]])
def test_what_has_no_sqnr_where_metrics_are_few_is_not_taken_for_zeros(tmp_path, metrics):
    for folder in ("", "what_if/mxfp8"):
        with RunWriter(tmp_path / folder, {"judged_by": "current"}) as writer:
            writer.add_tensors(1, ["a:input"], {name: np.array([np.nan]) for name in metrics})
    found = readiness(open_run(tmp_path))
    assert found.without == LeftOut(unmeasured=("a:input",))
    page = plain(found).splitlines()
    assert (
        "a:input is not in the table: there is no sqnr_db of it, and nothing says why. Have sqnr_db, nan_count and "
        "inf_count among watch.metrics."
    ) in page
    assert "Nothing that was recorded says what a recipe would do." in page


def test_a_run_has_no_folder_of_recipes_that_saw_nothing(tmp_path):
    follow(tmp_path, watch={"steps": [[100, None]]}, **SELDOM)
    assert not (tmp_path / "out" / "what_if").exists()
    assert readiness(open_run(tmp_path / "out")) is None


ORDINARY = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(open("out/run.json").read())
for _ in range(10):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
"""


def test_an_ordinary_run_is_ranked_and_knows_from_its_beginning_by_what(warm_python, tmp_path):
    (tmp_path / "train.py").write_text(ORDINARY)
    done = warm_python.narrowgauge(["run", "--out", "out", "--", "python", "train.py"], cwd=tmp_path, env=PLAIN)
    assert done.returncode == 0, done.stderr
    begun = json.loads(done.stdout)["meta"]
    assert begun["judged_by"] == "current"
    assert begun["watch"]["what_if"]["recipes"] == list(OTHERS)
    found = readiness(open_run(tmp_path / "out"))
    assert [asked.name for asked in found.recipes] == ["current", *OTHERS]
    assert (found.steps, len(found.tensors)) == ((10,), 3)


ENDS = """
import torch
from tests.session import programs
from narrowgauge.session.process import armed
from narrowgauge.session import plan
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.models.family import Family
import sys
from pathlib import Path
asked = plan.Plan("x", sys.argv.pop(1), ("train.py",), every=1, judge="current", what_if=("blockwise",), compiling=True)
armed.arm(str(asked.write()))
exec(programs.BASIC)
"""


def test_the_last_step_of_a_process_is_there_for_every_recipe(tmp_path):
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "out"), "2"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder in (tmp_path / "out", tmp_path / "out" / "what_if" / "blockwise"):
        assert set(open_run(folder).tensors()["step"].tolist()) == {1, 2}
