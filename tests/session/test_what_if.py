"""What other recipes would make of a program's tensors: counted as by hand, in runs of their own, changing nothing."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.session import programs
from tests.session.dumps.test_dumper import first_step

import narrowgauge as ng
from narrowgauge.cli.report import report_command
from narrowgauge.compute.recipes import by_name
from narrowgauge.observe.report.readiness import plain, readiness
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.session.attach import Session
from narrowgauge.session.config import Config
from narrowgauge.session.plan import Plan
from narrowgauge.session.what_if import judge_of


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
    assert (Config().for_watching()["judge"], Config().for_watching()["what_if"]) == ("current", ())


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
    assert page.startswith("What each recipe would do to this run's tensors\nrecipe")
    assert f"{worst.sqnr_db['current']:.1f}!" in page


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
