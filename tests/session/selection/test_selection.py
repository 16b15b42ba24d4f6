"""The `[watch]` table at work: what is selected is recorded, the rest costs nothing, what is not found is told."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.session import programs
from tests.session.inline import Writer
from tests.session.test_attach import follow
from torch import nn

from narrowgauge.compute.nn import gemms
from narrowgauge.compute.recipes import CURRENT
from narrowgauge.metrics import OPERAND_COLUMNS, finalize
from narrowgauge.observe.stats import Collector
from narrowgauge.session.attach import Session
from narrowgauge.session.plan import Plan
from narrowgauge.session.selection import selection
from narrowgauge.session.selection.selection import Selection
from narrowgauge.session.sites.part import Part, Rule
from narrowgauge.session.sites.showing import Showing


def rows(writer):
    return {(step, site) for step, sites, _ in writer.tensors for site in sites}


@pytest.mark.parametrize("convert", [{"recipe": "current"}, {"judge": "current"}])
def test_only_selected_sites_are_recorded(tmp_path, convert):
    watch = {"sites": ["0", "4", "!4:weight"], "roles": ["input", "weight"]}
    session, writer = follow(tmp_path, programs.BASIC, every=4, watch=watch, **convert)
    assert rows(writer) == {(step, site) for step in (4, 8) for site in ("0:input", "0:weight", "4:input")}
    assert session.facts()["unmet"] == []


def test_what_is_recorded_is_the_same_with_and_without_a_selection(tmp_path):
    everything = follow(tmp_path, programs.BASIC, every=8, judge="current")[1]
    selected = follow(tmp_path, programs.BASIC, every=8, judge="current", watch={"sites": ["2"]})[1]
    (_, sites, columns), (_, few, chosen) = everything.tensors[0], selected.tensors[0]
    assert few == [site for site in sites if site.startswith("2:")]
    for name in OPERAND_COLUMNS:
        whole = np.asarray(columns[name])[[sites.index(site) for site in few]]
        np.testing.assert_array_equal(whole, chosen[name])


def test_a_plain_tensor_that_is_not_selected_is_not_looked_at(tmp_path, monkeypatch):
    looked = []
    original = Collector.judge

    def judge(collector, module, role, *rest):
        looked.append(f"{module}:{role}")
        return original(collector, module, role, *rest)

    monkeypatch.setattr(Collector, "judge", judge)
    monkeypatch.setattr(Collector, "again", lambda *rest: None)  # which would not ask it a second time
    follow(tmp_path, programs.BASIC, every=8, judge="current", watch={"sites": ["2:input"]})
    assert looked == ["2:input"] * 2  # microbatches


def test_of_a_plain_tensor_that_is_not_selected_nothing_is_computed():
    class Chooses:
        chosen = ""

        def wants(self, module):
            return True

        def selects(self, module, role):
            return role == self.chosen

        def product(self, module, role, *rest, **own):
            counted.append(role)
            return True

    def turn(role):
        return lambda x: turned.append(role) or x.reshape(-1, x.shape[-1])

    def own(role, x):
        asked.append(role)
        return Rule(CURRENT.uses(role)[0])

    counted, turned, asked = [], [], []
    layer, x, observer = nn.Linear(16, 8), torch.randn(4, 16), Chooses()
    for observer.chosen in ("grad_output", "input"):
        y = layer(x)
        turns = turn("input"), turn("weight"), turn("grad_output")
        showing = Showing(CURRENT, training=lambda: True)
        showing.use("layer", observer, Part(x, layer.weight, y, *turns, own=own), None)
        y.sum().backward()
        assert not showing.notes
    assert counted == turned == asked == ["grad_output", "input"]


@pytest.mark.parametrize(
    ("steps", "every", "recorded"),
    [
        ([], 3, {3, 6}),
        ([[4, None]], 3, {6}),
        ([[0, 4]], 3, {3}),
        ([[5, 5]], 3, {5}),
        ([[0, 3], [7, 7]], 3, {3, 7}),
    ],
)
def test_steps_are_those_of_the_ranges_that_the_cadence_meets_and_those_named_alone(steps, every, recorded):
    selection = Selection({"steps": steps}, every)
    assert {step for step in range(1, 9) if selection.due(step)} == recorded


def test_steps_in_a_program(tmp_path):
    _, writer = follow(tmp_path, programs.BASIC, every=3, judge="current", watch={"steps": [[1, 3], [5, 5]]})
    assert {step for step, _ in rows(writer)} == {3, 5}


def test_only_selected_metrics_are_stored(tmp_path):
    watch = {"metrics": ["amax", "*sqnr_db"]}
    _, writer = follow(tmp_path, programs.BASIC, every=8, recipe="current", watch=watch)
    stored = [set(columns) for _, _, columns in writer.tensors]
    assert stored == [{"amax", "sqnr_db", "p5_row_sqnr_db", "p5_col_sqnr_db"}, {"amax", "gemm_sqnr_db"}]


def test_a_metric_is_looked_for_until_it_was_a_number_and_stored_as_before_from_then_on(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(selection, "finalize", lambda *args, **options: made.append(1) or finalize(*args, **options))
    watch = {"metrics": ["amax", "*sqnr_db"]}
    _, writer = follow(tmp_path, programs.BASIC, every=4, judge="current", watch=watch)
    (_, sites, first), (_, again, second) = writer.tensors
    assert sites == again
    assert set(first) == set(second) == {"amax", "sqnr_db", "p5_row_sqnr_db", "p5_col_sqnr_db"}
    assert len(made) == 1  # what no longer needs to be seen is left to the writer


def test_a_metric_that_no_site_has_is_told(tmp_path):
    watch = {"metrics": ["amax", "amax_ratio"]}
    session, _ = follow(tmp_path, programs.BASIC, every=8, judge="current", watch=watch)
    told = (
        "watch.metrics: amax_ratio: no recorded site has it, or it was never a number. amax_ratio is of input, weight, "
        "grad_output; only a scale from earlier steps has it: a delayed or static recipe."
    )
    assert session.facts()["unmet"] == [told]
    assert told in session.facts()["notes"]


NEVER = "no recorded site has it, or it was never a number."
RESULTS = "of output, grad_input, grad_weight; only converted layers have results: `--convert`."


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        (["gemm_sqnr_db"], f"gemm_sqnr_db: {NEVER} gemm_sqnr_db is {RESULTS}"),
        (["gemm_g*", "gemm_c*"], f"no recorded site has any of what is selected. gemm_gain, gemm_cosine are {RESULTS}"),
    ],
)
def test_metrics_that_leave_a_plain_run_without_rows_are_told_with_what_they_need(tmp_path, metrics, told):
    session, writer = follow(tmp_path, programs.BASIC, every=4, judge="current", watch={"metrics": metrics})
    assert rows(writer) == set()
    assert session.facts()["unmet"] == [f"watch.metrics: {told}"]


def test_globs_of_metrics_that_some_site_has_are_not_told(tmp_path):
    session, writer = follow(tmp_path, programs.BASIC, every=4, judge="current", watch={"metrics": ["gemm_*", "am*"]})
    assert rows(writer)
    assert session.facts()["unmet"] == []


def test_globs_that_match_nothing_are_told(tmp_path):
    watch = {"sites": ["0", "fc9"], "skip": ["4:output"]}
    session, _ = follow(tmp_path, programs.BASIC, every=8, judge="current", watch=watch)
    assert session.facts()["unmet"] == ["watch.sites: 'fc9' matched nothing in this program; there are: '0', '2', '4'."]


def test_steps_that_are_never_reached_are_told(tmp_path):
    session, writer = follow(tmp_path, programs.BASIC, every=3, judge="current", watch={"steps": [[100, None]]})
    assert rows(writer) == set()
    assert session.facts()["unmet"] == [
        "watch.steps: nothing was recorded; the program made 8 steps, and of these none is both selected and divided "
        "by every = 3."
    ]


def test_a_selection_that_leaves_nothing_is_told(tmp_path):
    session, writer = follow(tmp_path, programs.BASIC, every=4, judge="current", watch={"roles": ["output"]})
    assert rows(writer) == set()
    assert session.facts()["unmet"] == [
        "watch: its sites and roles together matched nothing in this program; there are: '0', '2', '4'. Only converted "
        "layers have results."
    ]


@pytest.mark.parametrize("convert", [{"recipe": "current"}, {"judge": "current"}])
def test_one_of_several_roles_that_cannot_be_is_told(tmp_path, convert):
    watch = {"roles": ["input", "output"]}
    session, writer = follow(tmp_path, programs.BASIC, every=4, watch=watch, **convert)
    plain = "recipe" not in convert
    assert {site.partition(":")[2] for _, site in rows(writer)} == ({"input"} if plain else {"input", "output"})
    said = "watch.roles: 'output' matched nothing in this program; only converted layers have results."
    assert session.facts()["unmet"] == ([said] if plain else [])


def test_a_result_of_a_converted_layer_that_is_not_selected_is_not_recomputed(tmp_path, monkeypatch):
    checked = []
    for name in ("sample_rows", "GemmSample"):
        original = getattr(gemms, name)
        monkeypatch.setattr(gemms, name, lambda *a, original=original, **k: checked.append(1) or original(*a, **k))
    follow(tmp_path, programs.BASIC, every=1, recipe="current", watch={"roles": ["input"]})
    assert checked == []
    _, writer = follow(tmp_path, programs.BASIC, every=1, recipe="current", watch={"sites": ["2:output"]})
    assert checked
    assert {site for _, site in rows(writer)} == {"2:output"}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("train.py",), "`--convert RECIPE` was not given"),
        (("ng.watch",), "ng.watch converts nothing; call ng.convert"),
    ],
)
def test_a_table_of_what_to_convert_is_told_where_nothing_is_converted(tmp_path, command, why):
    plan = Plan("x", str(tmp_path), command, compiling=True, judge="current", convert={"skip": ["0"]})
    told = [f"convert: the table was not used: {why}."]
    session = Session(plan, Writer())
    session.finish()
    facts = session.facts()
    assert facts["unmet"] == told
    assert told[0] in facts["notes"]
    for more in ({"recipe": "current"}, {"convert": {}}, {"convert": {"high": []}}, {"compiling": False}):
        session = Session(replace(plan, **more), Writer())
        session.finish()
        assert session.facts()["unmet"] == []
