"""Every outcome of the judge, and that it refuses to judge what cannot be compared."""

import json

import pytest
from tests.observe.verdict.fakes import evidence

from narrowgauge.observe.verdict import SameWeights, Verdict, judge

FLAT = [2.0] * 40


def wave(band):
    """A noise twin whose band is `band` percent."""
    return [2.0 * (1 + band / 3.18 / 100)] * 40


def shifted(pct):
    return [2.0 * (1 + pct / 100)] * 40


def judge_one(variant, noise=None, baseline=None, same=()):
    baseline = baseline or evidence("baseline", FLAT)
    verdict = judge(baseline, noise or evidence("noise", wave(0.5)), {variant.name: variant}, {variant.name: same})
    return verdict, verdict.variants[0]


def same_weights(loss_gap=0.01, cosine=0.999, length=1.0):
    return (SameWeights(step=10, loss=2.0, loss_gap_pct=loss_gap, grad_cosine=cosine, grad_norm_ratio=length),)


@pytest.mark.parametrize(
    ("pct", "outcome", "safe"),
    [(0.3, "inconclusive", "unknown"), (0.8, "watch", "unknown"), (3.0, "fail", "no"), (-3.0, "watch", "unknown")],
)
def test_the_gap_decides_beside_the_band(pct, outcome, safe):
    verdict, variant = judge_one(evidence("current", shifted(pct)))
    assert (variant.outcome, variant.safe) == (outcome, safe)
    assert variant.gap_pct == pytest.approx(pct)
    assert variant.band_pct == pytest.approx(0.5)
    assert verdict.judged


def test_a_narrow_band_and_a_small_gap_pass():
    _, variant = judge_one(evidence("current", shifted(0.05)), noise=evidence("noise", wave(0.1)))
    assert (variant.outcome, variant.safe) == ("pass", "yes")
    assert variant.sentence.startswith("Safe over these 40 steps: the loss is +0.05% against the baseline")


def test_inconclusive_says_at_how_many_steps_and_what_the_same_weights_show():
    _, variant = judge_one(evidence("current", shifted(0.3)), same=same_weights(0.012, 0.9987))
    assert "inconclusive at 40 steps" in variant.sentence
    assert variant.next_step.startswith("Run longer (some 160 steps, by the program's own setting): ")
    assert "At the same weights and batch the loss differs by +0.012% at most" in variant.sentence
    assert "0.9987" in variant.sentence


def test_a_lower_loss_is_undecided_where_one_batch_shows_no_fault_and_to_be_watched_where_it_does():
    _, variant = judge_one(evidence("current", shifted(-3.0)), same=same_weights(0.01, 0.999))
    assert variant.outcome == "inconclusive"
    assert "A lower loss is no harm" in variant.sentence
    _, variant = judge_one(evidence("current", shifted(-3.0)), same=same_weights(0.6, 0.999))
    assert variant.outcome == "watch"


@pytest.mark.parametrize("same", [same_weights(loss_gap=1.5), same_weights(loss_gap=-1.5), same_weights(cosine=0.5)])
def test_the_same_weights_can_withdraw_a_pass(same):
    _, variant = judge_one(evidence("current", FLAT), noise=evidence("noise", FLAT), same=same)
    assert variant.outcome == "watch"


@pytest.mark.parametrize(("length", "outcome"), [(2.0, "watch"), (0.5, "watch"), (1.1, "pass"), (0.978, "pass")])
def test_a_gradient_of_another_length_is_not_safe_though_its_direction_and_the_loss_are_right(length, outcome):
    # Its scale is wrong, as Adam's updates do not show.
    same = same_weights() + same_weights(length=length)
    _, variant = judge_one(evidence("current", FLAT), noise=evidence("noise", FLAT), same=same)
    assert variant.outcome == outcome
    said = f"its length is {length:.3g} times the baseline's"
    assert (said in variant.sentence) == (abs(length - 1) > 0.05)


def test_a_length_that_rounding_alone_can_make_is_called_no_wrong_scale():
    _, variant = judge_one(
        evidence("current", FLAT), noise=evidence("noise", FLAT), same=same_weights(3.4, 0.997, 1.06)
    )
    assert "its length is 1.06 times the baseline's: by a wrong or stale scale where a tensor's gain is off" in (
        variant.sentence
    )


def test_a_run_that_ended_by_itself_in_another_step_is_noted():
    verdict, variant = judge_one(evidence("current", FLAT[:30]))
    assert variant.window == (24, 30)
    (note,) = verdict.notes
    assert note.startswith("The current run ended by itself after 30 steps, the baseline after 40: ")
    for verdict, _ in (judge_one(evidence("x", FLAT)), judge_one(evidence("x", FLAT[:30], exit_code=1))):
        assert not verdict.notes


def test_a_lower_loss_of_gradients_of_another_length_is_to_be_watched():
    _, variant = judge_one(evidence("current", shifted(-3.0)), same=same_weights(length=1.1))
    assert variant.outcome == "watch"


def test_other_data_is_not_judged_and_names_the_step():
    other = evidence("current", FLAT, data_digest=[0.0, 1.0, 99.0, *range(3, 40)])
    verdict, variant = judge_one(other)
    assert variant.outcome == "unjudged"
    assert variant.sentence.startswith("Not judged: from step 3 on the current run saw other data")
    assert not verdict.judged


def test_another_number_of_microbatches_is_not_judged_unless_the_run_went_wrong():
    baseline = evidence("baseline", FLAT, microbatches=[4.0] * 40)
    fewer = [4.0] * 6 + [3.0] * 34
    verdict, variant = judge_one(evidence("current", shifted(-25), microbatches=fewer), baseline=baseline)
    assert variant.outcome == "unjudged"
    assert variant.sentence.startswith("Not judged: in step 7 the current run called backward another number of times")
    assert not verdict.judged
    for wrong in ({"exit_code": 1}, {"meta": {"nan_steps": 2}}):
        _, variant = judge_one(evidence("current", shifted(-25), microbatches=fewer, **wrong), baseline=baseline)
        assert variant.outcome == "fail"


def test_other_weights_are_not_judged():
    _, variant = judge_one(evidence("current", FLAT, meta={"weights_hash": "other"}))
    assert variant.outcome == "unjudged"
    assert "started from other weights" in variant.sentence


def test_a_noise_twin_with_other_data_withdraws_every_judgement():
    noise = evidence("noise", FLAT, data_digest=[5.0] * 40)
    verdict, variant = judge_one(evidence("current", FLAT), noise=noise)
    assert verdict.why_not.startswith("Not judged: from step 1 on the noise run")
    assert variant.outcome == "unjudged"


def test_a_variant_that_crashed_fails_with_its_error():
    _, variant = judge_one(evidence("current", FLAT[:5], exit_code=1, error="RuntimeError: boom"))
    assert variant.outcome == "fail"
    assert "ended with an error after 5 steps (RuntimeError: boom)" in variant.sentence
    assert "output.log" in variant.next_step


def test_steps_that_are_not_finite_fail():
    _, variant = judge_one(evidence("current", FLAT, meta={"nan_steps": 2}))
    assert variant.outcome == "fail"
    assert "2 of 40 steps" in variant.sentence


def test_a_baseline_that_ends_in_nan_is_held_against_nobody():
    nan = float("nan")
    broken = evidence("baseline", [2.0] * 20 + [nan] * 20, meta={"nan_steps": 20})
    verdict, variant = judge_one(evidence("current", [2.0] * 20 + [nan] * 20, meta={"nan_steps": 20}), baseline=broken)
    assert not verdict.judged
    assert verdict.why_not.startswith("Not judged: 20 of 40 steps of the baseline itself")
    assert (variant.outcome, variant.safe) == ("unjudged", "unknown")


@pytest.mark.parametrize(("pct", "outcome"), [(0.01, "inconclusive"), (0.8, "inconclusive"), (5.0, "fail")])
def test_a_few_steps_show_that_a_recipe_is_broken_but_never_that_it_is_safe(pct, outcome):
    run, base = evidence("current", shifted(pct)[:3]), evidence("baseline", FLAT[:3])
    _, variant = judge_one(run, noise=evidence("noise", FLAT[:3]), baseline=base)
    assert variant.outcome == outcome
    if outcome == "inconclusive":
        assert "inconclusive at 3 steps" in variant.sentence
        assert "So few steps decide nothing." in variant.sentence
        assert "some 80 steps" in variant.next_step


def test_a_loss_that_has_vanished_is_noted():
    falling = [2.0, *[1e-5] * 39]
    verdict, _ = judge_one(evidence("current", falling), baseline=evidence("baseline", falling))
    assert verdict.notes[0].startswith("The baseline's loss fell from 2 to 1e-05: gaps in percent of so small a number")


def test_a_recipe_that_was_refused_is_not_judged_and_says_why():
    refused = evidence("mxfp8", [], exit_code=2, error="K=24 is not a multiple of 32.", meta={"refused": True})
    _, variant = judge_one(refused)
    assert (variant.outcome, variant.sentence) == ("unjudged", "Not judged: K=24 is not a multiple of 32.")
    assert "Leave this recipe out" in variant.next_step


def test_other_data_of_several_models_says_what_counts():
    other = evidence("noise", FLAT, data_digest=[5.0] * 40)
    verdict, _ = judge_one(evidence("x", FLAT), noise=other, baseline=evidence("baseline", FLAT, meta={"models": 2}))
    assert "An input computed from another model's output counts as data" in verdict.why_not


def test_an_evaluation_far_off_fails_though_the_loss_matches():
    baseline = evidence("baseline", FLAT, eval_loss={20: 2.0, 40: 2.0})
    noise = evidence("noise", FLAT, eval_loss={20: 2.001, 40: 2.0})
    variant_run = evidence("current", FLAT, eval_loss={20: 2.0, 40: 2.1})
    _, variant = judge_one(variant_run, noise=noise, baseline=baseline)
    assert variant.eval_gap_pct == pytest.approx(5.0)
    assert variant.eval_band_pct == pytest.approx(0.0)
    assert variant.outcome == "fail"
    assert "The evaluation loss is +5%" in variant.sentence


@pytest.mark.parametrize(("same", "outcome"), [((), "watch"), (same_weights(), "pass"), (same_weights(0.6), "watch")])
def test_a_lower_evaluation_is_no_failure(same, outcome):
    baseline, noise = (evidence(name, FLAT, eval_loss={40: 2.0}) for name in ("baseline", "noise"))
    variant_run = evidence("current", shifted(0.05), eval_loss={40: 1.9})
    _, variant = judge_one(variant_run, noise=noise, baseline=baseline, same=same)
    assert (variant.eval_gap_pct, variant.outcome) == (pytest.approx(-5.0), outcome)


@pytest.mark.parametrize(
    ("loss", "evaluation", "outcome", "said"),
    [
        (-3.0, 0.6, "watch", "-3% against the baseline, chance alone makes ±0%; a loss lower than the baseline's"),
        (-3.0, 0.6, "watch", "as a higher one. The evaluation loss is +0.6%."),
        (-3.0, 2.0, "fail", "as a higher one. The evaluation loss is +2%."),
        (-0.05, 0.6, "watch", "-0.05% against the baseline, chance alone makes ±0%. The evaluation loss is +0.6%."),
    ],
)
def test_a_lower_loss_makes_a_worse_evaluation_no_worse_and_hides_none(loss, evaluation, outcome, said):
    """Each by itself: -3% beside +0.6% failed, as if it were 3% higher, and beside +2% nobody was told why."""
    baseline, noise = (evidence(name, FLAT, eval_loss={40: 2.0}) for name in ("baseline", "noise"))
    run = evidence("current", shifted(loss), eval_loss={40: 2.0 * (1 + evaluation / 100)})
    _, variant = judge_one(run, noise=noise, baseline=baseline, same=same_weights())
    assert variant.outcome == outcome
    assert said in variant.sentence


def test_a_loss_that_is_as_low_as_chance_makes_it_is_not_told_to_be_suspicious():
    _, variant = judge_one(evidence("current", shifted(-0.05)), noise=evidence("noise", FLAT), same=same_weights(1.5))
    assert variant.outcome == "watch"
    assert "suspicious" not in variant.sentence


def test_an_evaluation_below_zero_is_worse_where_it_is_higher():
    # As the negative log-likelihood of a density is.
    baseline, noise = (evidence(name, FLAT, eval_loss={40: -2.0}) for name in ("baseline", "noise"))
    variant_run = evidence("current", shifted(-0.3), eval_loss={40: -1.9})
    _, variant = judge_one(variant_run, noise=noise, baseline=baseline, same=same_weights())
    assert (variant.eval_gap_pct, variant.outcome) == (pytest.approx(5.0), "fail")


NAN = float("nan")


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome", "gap"),
    [
        ({20: NAN, 40: NAN}, {20: NAN, 40: NAN}, "pass", None),  # batches without a target, in every run
        ({20: 2.0, 40: NAN}, {20: 2.0, 40: NAN}, "pass", 0.0),
        ({20: 0.0, 40: 0.0}, {20: 0.0, 40: 0.0}, "pass", 0.0),
        ({20: 2.0, 40: 2.0}, {20: 2.0, 40: NAN}, "fail", NAN),
        ({20: 2.0, 40: 2.0}, {20: 2.0, 40: float("inf")}, "fail", NAN),
    ],
)
def test_an_evaluation_without_a_number_is_held_against_a_recipe_where_the_baseline_has_one(ours, theirs, outcome, gap):
    baseline, noise = (evidence(name, FLAT, eval_loss=ours) for name in ("baseline", "noise"))
    verdict, variant = judge_one(evidence("current", FLAT, eval_loss=theirs), noise=noise, baseline=baseline)
    assert (variant.eval_gap_pct, variant.outcome) == (pytest.approx(gap, nan_ok=True), outcome)
    assert ("The evaluation loss is not finite, and the baseline's is." in variant.sentence) == (outcome == "fail")
    lost = sum(value != value for value in ours.values())
    assert [note for note in verdict.notes if "evaluation" in note] == (
        []
        if not lost
        else [
            f"The baseline's own evaluation loss is not finite in {lost} of 2 evaluations, by which no "
            "recipe is judged: batches without a target, say, have the mean of nothing, which is NaN."
        ]
    )


def test_an_evaluation_of_the_twin_without_a_number_leaves_the_band_to_the_others():
    baseline = evidence("baseline", FLAT, eval_loss={20: 2.0, 30: 2.0, 40: 2.0})
    noise = evidence("noise", FLAT, eval_loss={20: 2.0, 30: 2.02, 40: NAN})
    _, variant = judge_one(evidence("x", FLAT, eval_loss={20: 2.0, 30: 2.0, 40: 2.03}), noise=noise, baseline=baseline)
    assert variant.eval_band_pct == pytest.approx(12.71)  # of the one that is left
    assert variant.outcome == "pass"


@pytest.mark.parametrize(("evaluations", "band"), [(1, 12.71), (3, 4.30), (6, 3.18), (10, 3.18)])
def test_few_evaluations_know_little_of_chance(evaluations, band):
    steps = [4 * (i + 1) for i in range(evaluations)]
    baseline, noise = (
        evidence(name, FLAT, eval_loss=dict.fromkeys(steps, value)) for name, value in (("b", 2.0), ("noise", 2.02))
    )
    run = evidence("current", FLAT, eval_loss=dict.fromkeys(steps, 2.08))
    _, variant = judge_one(run, noise=noise, baseline=baseline)
    assert variant.eval_band_pct == pytest.approx(band)
    assert (variant.outcome == "fail") == (band < 4.0)


def test_never_evaluated_is_said_by_an_empty_name():
    _, variant = judge_one(evidence("current", FLAT))
    assert variant.eval_name == ""
    assert variant.eval_gap_pct is None


def test_speed_is_not_judged_where_it_was_emulated():
    _, variant = judge_one(evidence("current", FLAT, step_seconds=[0.1] * 40))
    assert variant.speedup is None
    assert variant.worth_it == "unknown"
    assert "Its products were emulated here, which says nothing of speed: " in variant.sentence


@pytest.mark.parametrize("native", [False, True])
def test_what_is_not_safe_is_not_worth_it_and_the_sentence_says_the_same(native):
    facts = {"meta": {"emulated": not native}, "step_seconds": [0.1] * 40}
    _, variant = judge_one(evidence("current", shifted(3.0), **facts), baseline=evidence("baseline", FLAT, **facts))
    assert (variant.safe, variant.worth_it) == ("no", "no")
    assert "not known" not in variant.sentence
    told = "It runs at 1.00x the baseline's speed, which" if native else "Not worth it, however fast"
    assert f"{told}" in variant.sentence
    assert "while it is not safe." in variant.sentence


@pytest.mark.parametrize(("seconds", "worth"), [(0.5, "yes"), (0.99, "no"), (0.97, "unknown"), (2.0, "no")])
def test_speed_on_real_hardware(seconds, worth):
    native = {"emulated": False}
    baseline = evidence("baseline", FLAT, meta=native, step_seconds=[1.0] * 40)
    run = evidence("current", FLAT, meta=native, step_seconds=[seconds] * 40)
    _, variant = judge_one(run, noise=evidence("noise", FLAT), baseline=baseline)
    assert variant.speedup == pytest.approx(1 / seconds)
    assert variant.worth_it == worth


def test_disturbed_and_warm_up_steps_do_not_count_for_time():
    seconds = [9.0] * 3 + [0.1] * 30 + [5.0] * 7
    clean = [1.0] * 33 + [0.0] * 7
    _, variant = judge_one(evidence("current", FLAT, step_seconds=seconds, clean=clean))
    assert variant.step_seconds == pytest.approx(0.1)


def test_where_every_step_was_recorded_there_is_no_speed():
    native = {"emulated": False}
    baseline = evidence("baseline", FLAT, meta=native, step_seconds=[1.0] * 40)
    run = evidence("current", FLAT, meta=native, step_seconds=[20.0] * 40, clean=[0.0] * 40)
    _, variant = judge_one(run, baseline=baseline)
    assert variant.step_seconds is None
    assert variant.speedup is None
    assert variant.worth_it == "unknown"


def test_flop_share_counts_layers_that_ran():
    flops = {"total": 1000, "linear": {"a": 300, "b": 500, "c": 100}}
    rows = [
        {"name": "a", "recipe": "current", "calls": 3},
        {"name": "b", "recipe": "current", "calls": 0},
        {"name": "c", "recipe": None, "calls": 3},
    ]
    baseline = evidence("baseline", FLAT, meta={"flops": flops})
    verdict, variant = judge_one(evidence("current", FLAT, meta={"conversion": rows}), baseline=baseline)
    assert variant.flop_share_pct == pytest.approx(30.0)
    assert any("converted but never called: b" in note for note in verdict.notes)


def test_a_product_that_stays_high_is_in_neither_share_of_what_ran_in_fp8():
    """`[[high]]`: all of a layer's products were in the share of all FLOPs, more than that of its layers."""
    rows = [
        {"name": name, "recipe": "current", "calls": 3, "flops_per_token": 300, "fp8_gemms": gemms}
        for name, gemms in (("a", 2), ("b", 1))
    ]
    flops = {"total": 1200, "linear": {"a": 300, "b": 300}}
    baseline = evidence("baseline", FLAT, meta={"flops": flops})
    _, variant = judge_one(evidence("current", FLAT, meta={"conversion": rows}), baseline=baseline)
    assert (variant.flop_share_pct, variant.linear_share_pct) == pytest.approx((25.0, 50.0))


def test_a_recipe_none_of_whose_layers_was_called_is_not_judged_and_says_why():
    """A program that multiplies by `F.linear(x, layer.weight)`: its run is the baseline again."""
    rows = [{"name": name, "recipe": "current", "calls": 0, "flops_per_token": 300} for name in "ab"]
    verdict, variant = judge_one(evidence("current", FLAT, meta={"conversion": rows}), same=same_weights())
    assert (variant.outcome, variant.safe, variant.linear_share_pct, verdict.judged) == (
        "unjudged",
        "unknown",
        0,
        False,
    )
    assert variant.sentence == (
        "Not judged: nothing ran in FP8, for what the program multiplies by is not its layers: converted but never "
        "called: a, b."
    )
    assert variant.next_step.startswith("Call the layers in place of a function of their weights")
    rows[0]["calls"] = 40
    _, variant = judge_one(evidence("current", FLAT, meta={"conversion": rows}), same=same_weights())
    assert (variant.outcome, variant.linear_share_pct) == ("inconclusive", 50)  # of two constant losses


def test_a_run_that_failed_before_its_layers_were_called_failed():
    rows = [{"name": "a", "recipe": "current", "calls": 0}]
    _, variant = judge_one(evidence("current", [], exit_code=1, error="ValueError", meta={"conversion": rows}))
    assert variant.outcome == "fail"


def test_the_share_of_linear_layers_is_of_all_models_and_ranks():
    run = evidence("current", FLAT)
    row = {"name": "a", "recipe": "current", "calls": 1, "flops_per_token": 300, "fp8_gemms": 2, "part": "x"}
    run.run.metas = {0: {"conversion": [row]}, 1: {"conversion": [{**row, "recipe": None, "part": "y"}]}}
    _, variant = judge_one(run)
    assert variant.linear_share_pct == pytest.approx(100 / 3)
    assert [each["of_ranks"] for each in variant.conversion] == [[0], [1]]


def test_the_verdict_survives_json():
    sites = {"mlp:input": {"sqnr_db": 31.0, "gain": 1.0}}
    verdict, _ = judge_one(evidence("current", FLAT, sites=sites), same=same_weights())
    again = Verdict.from_dict(json.loads(json.dumps(verdict.to_dict())))
    assert again == verdict


@pytest.mark.parametrize(
    ("recorded", "cost"), [(1.5, 12.5), (0.9, 0.0), (None, None)], ids=["longer", "by chance shorter", "too few"]
)
def test_what_watching_cost_is_what_recorded_steps_took_longer(recorded, cost):
    """Beside the ratio of both, as the page has it: not the time of counting alone, of a process that also imports."""
    watch = {"seconds": 0.1, "every": 4}
    if recorded:
        watch |= {"recorded_step_seconds": recorded, "other_step_seconds": 1.0}
    run = evidence("current", FLAT, meta={"watch": watch}, memory_bytes=dict.fromkeys(range(4, 41, 4), 1.0))
    _, variant = judge_one(run)
    assert variant.watch_pct == (cost if cost is None else pytest.approx(cost))
