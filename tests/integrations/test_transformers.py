"""Hugging Face's Trainer: Llama under activation checkpointing, then GPT-2, whose layers are Conv1D, then a Llama held
in BF16; what every recipe without state would do to them, and how long they wait for their data."""

import json

import pytest
from tests.integrations import what_if
from tests.integrations.watched import (
    check_converted,
    check_logged,
    check_scalars,
    check_tensors,
    check_unharmed,
    check_waits,
    play,
)
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Hugging Face Trainer",
    ("transformers", "accelerate"),
    "Llama, in BF16 as well, and GPT-2, gradient accumulation, activation checkpointing",
    converted=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    settings = tmp_path_factory.mktemp("settings") / "asked.toml"
    settings.write_text(f"[watch]\nwhat_if = {json.dumps(what_if.RECIPES)}\n")
    how = {"apart": True, "options": ("--config", str(settings)), "hand": what_if.HAND}
    return play(WORKS, tmp_path_factory, "hf_trainer", warm=warm_python, **how)


@pytest.fixture(scope="module")
def by_hand(seen):
    return what_if.by_hand(seen, named=named)


def named(step, site):
    return ("", "GPT2LMHeadModel.", "LlamaForCausalLM1.")[(step - 1) // 3] + site


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen, in_bf16=(7, 8, 9))  # whose gradients are


def test_every_tensor_is_what_it_is_by_hand(seen, by_hand):
    want = by_hand["current"]
    assert {step for step, _ in want} == {1, 2, 3, 4, 5, 6, 7, 8, 9}
    check_tensors(seen, want)
    assert "GPT2LMHeadModel.transformer.h.0.attn.c_attn:grad_output" in {site for _, site in want}
    assert "model.layers.1.mlp.down_proj:grad_output" in {site for _, site in want}


def test_what_every_other_recipe_would_make_of_every_tensor_is_what_it_is_by_hand(seen, by_hand):
    what_if.check_recipes(seen, by_hand)
    weight = "LlamaForCausalLM1.model.layers.1.mlp.down_proj:weight"
    found = {recipe: table[7, weight] for recipe, table in by_hand.items()}
    several = {recipe for recipe, row in found.items() if row["scale_min"] < row["scale_max"]}
    assert several - {"blockwise"} == {"rowwise", "mxfp8", "mxfp8-ocp"}  # its two blocks may have the same
    assert {recipe for recipe, row in found.items() if row["saturation_pct"]} == {"mxfp8-ocp"}


def test_the_report_ranks_recipes_and_tensors_as_the_numbers_by_hand_do(seen, by_hand):
    trouble = what_if.check_ranked(seen, by_hand)
    assert [recipe for recipe, sites in trouble.items() if sites] == ["mxfp8-ocp"]
    what_if.check_printed(seen)


def test_loss_norm_and_rate_are_those_that_the_trainer_logs(seen):
    check_logged(seen, [row for rows in seen.watched.said.values() for row in rows])
    assert set(seen.case.run().scalars()["tokens"].tolist()) == {2 * 4 * 32}


def test_its_layers_are_converted(seen):
    check_converted(seen, named=named)


def test_what_each_step_waited_for_its_data_is_what_it_is_from_outside(seen):
    waits = seen.case.waits()[0]
    found = iter(seen.case.run().scalars()["data_seconds"].tolist())
    told = {name: [next(found) for _ in its] for name, its in waits.items()}
    for name in ("llama", "held"):
        check_waits(told[name], waits[name], slept=True)
    # A worker had made the batches of the last two steps before they were asked for: what they slept is not waited for.
    check_waits(told["gpt2"], waits["gpt2"])
