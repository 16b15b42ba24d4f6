"""Where NaN and Inf began: the sentence, word by word, of runs whose end is known."""

import numpy as np
import pytest

from narrowgauge.observe.report import text
from narrowgauge.observe.report.html import render
from narrowgauge.observe.report.readiness import Asked, Readiness, in_short
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.observe.verdict import Evidence, judge
from narrowgauge.observe.verdict.began import began

ROLES = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
LAYERS = ("z", "a.10", "a.2")  # as they run, which no order of names is
CONVERTED = {"recipe": "current", "conversion": [{"name": name, "recipe": "current"} for name in LAYERS]}
AS_THEY_RUN, BY_SHARE = "in the order of layers", "the order of layers is not known: the smallest share first"
OF_Z = ["z:output", *(f"{layer}:{role}" for layer in LAYERS[1:] for role in ("input", "output"))]
GRADIENTS = [f"{layer}:{role}" for layer in LAYERS for role in ROLES[3:]]


def written(folder, bad, lost=(), skipped=(), every=2, steps=8, facts=None, **columns):
    """A run of `steps`; `bad`: by step and tensor how many of 64 elements are NaN, or a pair, with how many are Inf."""
    sites = [f"{layer}:{role}" for layer in LAYERS for role in ROLES]
    with RunWriter(folder, CONVERTED if facts is None else facts) as writer:
        for step in range(1, steps + 1):
            row = {"skipped": 1.0} if step in skipped else {}
            writer.add_scalars(step, loss=np.nan if step in lost else 1.0, nonfinite=float(step in lost), **row)
            if step % every:
                continue
            has = [bad.get(step, {}).get(site, 0) for site in sites]
            nan, inf = np.array([each if isinstance(each, tuple) else (each, 0) for each in has]).T
            numel = np.full(len(sites), 64)
            writer.add_tensors(step, sites, {"numel": numel, "nan_count": nan, "inf_count": inf, **columns})
    return open_run(folder)


def everywhere(n=64):
    return {f"{layer}:{role}": n for layer in LAYERS for role in ROLES}


BY_INPUT = {"z:input": 1, **dict.fromkeys(OF_Z, 8), **dict.fromkeys(GRADIENTS, 8)}


@pytest.mark.parametrize(
    ("facts", "named", "order"),
    [
        (CONVERTED, "z:input, z:output, a.10:input", AS_THEY_RUN),
        ({}, "z:input, a.2:input, a.10:input", BY_SHARE),
    ],
)
def test_an_input_with_nan(tmp_path, facts, named, order):
    """Nothing else of the step says it, and it is healthy again behind it: no tensor's median has any."""
    run = written(tmp_path, {4: BY_INPUT}, lost=[4], facts=facts)
    assert began(run) == (
        f"Step 4 is the first recorded one with NaN: in {named} and 12 more ({order}). "
        "Loss or gradient norm was first not finite there, too."
    )


def test_an_input_of_one_layer_in_one_step(tmp_path):
    run = written(tmp_path, {4: {"a.2:input": 3}, 6: everywhere()}, lost=[6])
    assert began(run) == (
        "Step 4 is the first recorded one with NaN: in a.2:input. Loss or gradient norm was first not finite in step 6."
    )


@pytest.mark.parametrize(
    ("lost", "look", "went"),
    [
        ([3, 4, 5, 6], 3, "in step 3, which was not recorded"),
        ([2, 3, 4], 2, "in step 2, where no recorded tensor has any"),
        ([4, 5, 6], 3, "there, too"),
    ],
)
def test_weights_that_an_update_has_spoiled(tmp_path, lost, look, went):
    run = written(tmp_path, {4: everywhere(), 6: everywhere()}, lost=lost)
    assert began(run) == (
        "Step 4 is the first recorded one with NaN: in z:weight, a.10:weight, a.2:weight and 15 more "
        "(in the order of layers). Weights have it already, so an update brought it: look at the gradients of step "
        f"{look} and before. Loss or gradient norm was first not finite {went}."
    )


def test_weights_that_came_so(tmp_path):
    run = written(tmp_path, {1: everywhere()}, lost=range(1, 9), every=1)
    assert "Weights have it already, before any update. " in began(run)


def test_a_step_that_was_skipped_has_spoiled_no_weight(tmp_path):
    run = written(tmp_path, {6: {"z:weight": 1}}, lost=[3], skipped=[3])
    assert "look at the gradients of step 5 and before. Loss or gradient norm was first not finite in step 3" in began(
        run
    )


def test_inf_in_gradients_alone(tmp_path):
    """They go from the last layer to the first, and what clips or replaces them keeps all else finite."""
    run = written(tmp_path, {6: {site: (0, 5) for site in GRADIENTS if site.endswith(("_output", "_weight"))}})
    assert began(run) == (
        "Step 6 is the first recorded one with Inf: in a.2:grad_output, a.2:grad_weight, a.10:grad_output and 3 more "
        "(in the order of layers). Loss and gradient norm stayed finite."
    )


def test_both_in_two_tensors_of_a_layer(tmp_path):
    run = written(tmp_path, {6: {"z:grad_output": (0, 5), "z:grad_input": (2, 1)}}, facts={})
    assert began(run) == (
        "Step 6 is the first recorded one with NaN and Inf: in z:grad_output and z:grad_input. "
        "Loss and gradient norm stayed finite."
    )


def test_what_a_gradient_scaler_skips_a_step_for_is_nothing_wrong(tmp_path):
    assert began(written(tmp_path / "a", {2: {"z:grad_output": (0, 5)}}, skipped=[2])) == ""
    assert began(written(tmp_path / "b", {2: {"z:input": 5}}, lost=[2], skipped=[2])).startswith("Step 2 is the first")


def test_a_loss_alone(tmp_path):
    assert began(written(tmp_path, {}, lost=[6, 7])) == (
        "Loss or gradient norm was first not finite in step 6, where no recorded tensor has any."
    )


def test_a_run_without_tensors(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.add_scalars(step, loss=1.0, nonfinite=float(step == 2))
    assert began(open_run(tmp_path)) == "Loss or gradient norm was first not finite in step 2."


def test_a_run_with_nothing_wrong(tmp_path):
    run = written(tmp_path, {})
    assert began(run) == ""
    assert "not finite" not in text(run)
    assert "Not finite" not in render(None, {"a": run})
    assert in_short(Readiness((), (), ())) == ""


def test_readiness_blames_no_recipe_for_it():
    asked = tuple(Asked(name, 5, trouble, 30.0, ()) for name, trouble in (("current", 4), ("mxfp8", 3)))
    assert in_short(Readiness(asked, (), (), broken=3)) == (
        "In trouble: 4 of 5 under current and 3 of 5 under mxfp8. "
        "3 of these are so whatever the recipe: the run itself has NaN or Inf there."
    )


def test_a_verdict_says_it_of_a_variant_and_of_the_baseline(tmp_path):
    fine, bad = (
        Evidence(
            name, written(tmp_path / name, its, lost=lost, facts={**CONVERTED, "steps": 8, "nan_steps": len(lost)})
        )
        for name, its, lost in (("fine", {}, ()), ("bad", {6: {"z:input": 3}, 8: {"z:input": 3}}, (6, 7, 8)))
    )
    said = (
        "Step 6 is the first recorded one with NaN: in z:input. Loss or gradient norm was first not finite there, too."
    )
    (variant,) = judge(fine, None, {"bad": bad}, {}).variants
    assert variant.sentence == (
        "Not safe: 3 of 8 steps had a loss or gradient that is not finite. "
        f"Not worth it, however fast, while it is not safe. {said}"
    )
    assert variant.next_step == "For z:input: mend what had them first."
    assert judge(bad, None, {"fine": fine}, {}).why_not == (
        "Not judged: 3 of 8 steps of the baseline itself had a loss or gradient that is not finite. "
        f"{said} Make it train as written first."
    )
