"""Layers that stay high in a converted run: judged by the run's own recipe, and shown apart from those in FP8."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from narrowgauge.cli.outcome import converted
from narrowgauge.observe.report import gather, html
from narrowgauge.observe.report.readiness import readiness
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.observe.verdict.high import stays_high
from narrowgauge.observe.verdict.worst import worst_tensors
from narrowgauge.session.attach import Session
from narrowgauge.session.config.tables import Config
from narrowgauge.session.plan import Plan


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head, self.conv = nn.Linear(32, 32), nn.Linear(32, 48), nn.Conv1d(1, 1, 1)

    def forward(self, x):
        return self.lm_head(self.body(self.conv(x[:, None])[:, 0]))


class Tied(nn.Module):
    """Decodes by the weight that it encoded by."""

    def __init__(self):
        super().__init__()
        self.encode, self.middle = nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x):
        return F.linear(self.middle(self.encode(x)), self.encode.weight.t())


def train(steps=2, model=Model):
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(tmp_path, recipe, model=Model, **settings):
    plan = Plan("run", str(tmp_path / "run"), ("train.py",), recipe, **{**settings, "every": 1})
    with RunWriter(plan.folder) as writer:
        writer.update_meta(recipe=recipe)
        session = Session(plan, writer)
        train(model=model)
        session.finish()
        writer.update_meta(**session.facts())
    return open_run(plan.folder)


@pytest.mark.parametrize(
    ("recipe", "judge"), [("rowwise", "rowwise"), ("mxfp8", "mxfp8"), ("delayed", "current"), (None, "current")]
)
def test_who_judges_it(recipe, judge):
    assert Config().for_watching(recipe)["judge"] == judge


def test_its_rows_are_those_of_the_runs_recipe(tmp_path):
    run = recorded(tmp_path, "rowwise", **Config().for_watching("rowwise"))
    assert (run.meta["judged"], run.meta["convolutions"]) == (["conv", "lm_head"], ["conv"])
    scales = run.tensors(columns=["scale_min", "scale_max"], sites=["body:weight", "lm_head:weight"])
    assert scales.rows == 4
    assert (scales["scale_min"] < scales["scale_max"]).all(), "one scale is another recipe's"


def test_what_multiplies_by_the_weight_of_a_layer_in_fp8_elsewhere_stays_high_and_has_rows_of_its_own(tmp_path):
    run = recorded(tmp_path, "current", Tied, **Config().for_watching("current"))
    assert run.meta["judged"] == ["encode.weight"]
    rows = run.tensors(columns=["numel"], steps=[1])
    elements = dict(zip(rows["site"].tolist(), rows["numel"].tolist(), strict=True))
    assert elements["encode:input"] == 16 * 32
    assert elements["encode.weight:input"] == 16 * 16
    assert elements["encode:grad_output"] == 16 * 16
    assert elements["encode.weight:grad_output"] == 16 * 32
    high = stays_high(run.metas)
    assert {site.split(":")[0] for site in elements if high(site)} == {"encode.weight"}
    assert "1 other product (encode.weight)" in converted(tmp_path / "run")[1]


def test_it_is_shown_apart(tmp_path):
    run = recorded(tmp_path, "rowwise", **Config().for_watching("rowwise"))
    high = stays_high(run.metas)
    assert {site.split(":")[0] for site in map(str, run.tensors(columns=[])["site"]) if high(site)} == {
        "lm_head",
        "conv",
    }
    assert {tensor.site.split(":")[0] for tensor in worst_tensors(run)} == {"body"}
    assert gather.layers({"run": run}).names == ("body",)
    page = html(None, {"run": run}, tmp_path / "page.html").read_text()
    apart = page[page.index("would do to what stayed high") :]
    assert "lm_head:" in apart
    assert "lm_head:" not in page[page.index("The worst tensors of") : page.index("would do to what stayed high")]


def test_rows_of_another_recipe_are_not_the_runs(tmp_path):
    run = recorded(tmp_path, "delayed", **Config().for_watching("delayed") | {"what_if": ("rowwise",), "seldom": False})
    found = readiness(run)
    assert found is not None
    sites = {tensor.site: set(tensor.sqnr_db) for tensor in found.tensors}
    assert sites["body:input"] == {"delayed", "rowwise"}
    assert sites["lm_head:input"] == {"rowwise"}
