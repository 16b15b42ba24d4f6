"""The five worst tensors: the right site, for the right reason, in the right order."""

import numpy as np
import pytest
from tests.observe.verdict.fakes import FakeRun

from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.observe.verdict.worst import worst_tensors

HEALTHY = {"sqnr_db": 31.5, "gain": 1.0, "saturation_pct": 0.0, "lost_energy_pct": 0.0, "p5_col_sqnr_db": 30.0}


def worst(**sites):
    return worst_tensors(FakeRun({}, {}, {name.replace("__", ":"): {**HEALTHY, **row} for name, row in sites.items()}))


@pytest.mark.parametrize(
    ("row", "metric", "says"),
    [
        ({"saturation_pct": 3.0}, "saturation_pct", "3% of its elements exceed"),
        ({"gain": 2.0}, "gain", "2.0000 times the originals"),
        ({"lost_energy_pct": 5.0}, "lost_energy_pct", "flushed to zero"),
        ({"p5_col_sqnr_db": 1.8}, "p5_col_sqnr_db", "outlier channels"),
        ({"p5_row_sqnr_db": 5.0}, "p5_row_sqnr_db", "outlier tokens"),
        ({"amax_ratio": 4.0}, "amax_ratio", "4 times as large"),
        ({"gemm_gain": 0.9}, "gemm_gain", "does not belong to its tensor"),
        ({"nan_count": 3.0}, "nan_count", "3 elements are NaN"),
        ({"sqnr_db": 10.0}, "sqnr_db", "only 10.0 dB"),
    ],
)
def test_each_sign_is_found_and_said(row, metric, says):
    first = worst(a__input={}, sick__input=row, b__weight={})[0]
    assert (first.site, first.metric) == ("sick:input", metric)
    assert says in first.why
    assert first.remedy


def test_a_number_of_nans_is_one_that_a_step_had(tmp_path):
    """A weight is NaN as a whole or not at all: the mean of the last two steps said half of it."""
    with RunWriter(tmp_path) as writer:
        for step, nan_count in enumerate((0, 0, 0, 512), 1):
            writer.add_tensors(step, ["a:weight"], {"sqnr_db": np.full(1, 30.0), "nan_count": np.array([nan_count])})
    assert worst_tensors(open_run(tmp_path))[0].why == "512 elements are NaN."


def test_healthy_sites_are_ordered_by_sqnr_and_say_so():
    found = worst(a__input={"sqnr_db": 31.0}, b__input={"sqnr_db": 25.0}, c__input={"sqnr_db": 28.0})
    assert [w.site for w in found] == ["b:input", "c:input", "a:input"]
    assert found[0].why.startswith("Healthy: 25.0 dB")


def test_what_is_represented_exactly_comes_last_and_is_counted():
    found = worst(a__input={"sqnr_db": float("inf")}, b__input={"sqnr_db": 150.0})
    assert [w.site for w in found] == ["b:input", "a:input"]
    assert (found[1].why, found[1].remedy) == ("Healthy: the recipe loses nothing of it.", "nothing to do")


def test_a_sick_site_comes_before_every_healthy_one_and_there_are_at_most_five():
    sites = {f"l{i}__input": {"sqnr_db": 23.0 + i} for i in range(8)}
    found = worst(**sites, sick__input={"saturation_pct": 0.2})
    assert len(found) == 5
    assert found[0].site == "sick:input"


def test_results_without_sqnr_are_left_out_unless_something_is_wrong():
    run = FakeRun({}, {}, {"a:output": {"gemm_gain": 1.0}, "b:output": {"gemm_gain": 1.5}})
    assert [w.site for w in worst_tensors(run)] == ["b:output"]


@pytest.mark.parametrize(
    ("role", "operand", "lost"),
    [
        ("grad_weight", "input", {"p5_col_sqnr_db": 0.03}),
        ("output", "input", {"p5_col_sqnr_db": 0.03}),
        ("output", "weight", {"saturation_pct": 5.0}),
        ("grad_input", "grad_output", {"gain": 0.9}),
    ],
)
def test_a_product_that_an_operand_spoils_is_told_behind_it_with_its_remedy(role, operand, lost):
    """An outlier channel flushes all others: what is multiplied is gone, and no scale is wrong."""
    sites = {f"a:{operand}": {**HEALTHY, **lost}, f"a:{role}": {"gemm_gain": 0.05}, "b:input": HEALTHY}
    first, second, third = worst_tensors(FakeRun({"recipe": "current"}, {}, sites))
    assert (first.site, second.site, third.site) == (f"a:{operand}", f"a:{role}", "b:input")
    assert second.why == f"The product is 0.0500 times what it should be, by what a:{operand} lost."
    assert second.remedy == first.remedy


@pytest.mark.parametrize(
    ("sites", "gain"),
    [
        ({"a:input": {"p5_col_sqnr_db": 0.03}}, 2.0),  # nothing that is lost makes a product larger
        ({"a:input": {"p5_col_sqnr_db": 19.0}}, 0.5),  # little was lost
        ({"a:weight": {"p5_col_sqnr_db": 0.03}}, 0.5),  # no operand of this product
        ({"b:input": {"p5_col_sqnr_db": 0.03}}, 0.5),  # another layer's
    ],
)
def test_a_product_that_no_operand_explains_stays_a_bug(sites, gain):
    sites = {site: {**HEALTHY, **row} for site, row in sites.items()}
    found = worst_tensors(FakeRun({"recipe": "current"}, {}, {"a:grad_weight": {"gemm_gain": gain}, **sites}))
    assert next(w.why for w in found if w.site == "a:grad_weight").endswith("does not belong to its tensor.")


def test_a_run_without_tensors_has_no_worst():
    assert worst_tensors(FakeRun({}, {}, {})) == ()


def test_of_several_healthy_tensors_none_is_called_the_lowest():
    sites = {name: {**HEALTHY, "sqnr_db": value} for name, value in (("a:input", 30.0), ("b:input", 31.0))}
    found = [(w.site, w.why) for w in worst_tensors(FakeRun({}, {}, sites))]
    said = "Healthy: {} dB of signal over quantization noise, among the lowest; no sign of trouble."
    assert found == [("a:input", said.format(30.0)), ("b:input", said.format(31.0))]


def test_what_stays_high_is_not_among_the_worst_in_fp8():
    sites = {
        "body:input": HEALTHY,
        "head:input": {**HEALTHY, "sqnr_db": 3.0},
        "conv.left:weight": {**HEALTHY, "gain": 2},
    }
    ended = FakeRun({"recipe": "rowwise", "judged": ["head", "conv"]}, {}, sites)
    assert [w.site for w in worst_tensors(ended)] == ["body:input"]
    killed = FakeRun(
        {"recipe": "rowwise", "conversion": [{"name": "head"}, {"name": "body", "recipe": "x"}]}, {}, sites
    )
    assert [w.site for w in worst_tensors(killed)] == ["conv.left:weight", "body:input"]
    plain = FakeRun({"judged": ["head", "conv"]}, {}, sites)
    assert len(worst_tensors(plain)) == 3


@pytest.mark.parametrize(
    ("recipe", "row", "remedy"),
    [
        ("delayed", {"saturation_pct": 3.0}, "current scaling, or a margin"),
        ("mxfp8-ocp", {"saturation_pct": 3.0}, "mxfp8, whose scales are rounded up"),
        ("current", {"gain": 2.0}, "a scale that belongs to this tensor"),
        ("current", {"p5_row_sqnr_db": 3.0}, "rowwise scaling, or blockwise scaling"),
        ("fake-rowwise", {"p5_row_sqnr_db": 3.0}, "blockwise scaling"),
        ("blockwise", {"p5_col_sqnr_db": 3.0}, "this layer in high precision"),
        ("mxfp8", {"sqnr_db": 3.0}, "this layer in high precision"),
        ("", {"p5_col_sqnr_db": 3.0}, "blockwise scaling"),
    ],
)
def test_nothing_is_advised_that_the_run_does_already(recipe, row, remedy):
    (found,) = worst_tensors(FakeRun({"recipe": recipe}, {}, {"a:input": {**HEALTHY, **row}}))
    assert found.remedy == remedy
