"""Hugging Face's Trainer: Llama under activation checkpointing, then GPT-2, whose layers are Conv1D."""

import pytest
from tests.integrations.watched import check_converted, check_logged, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Hugging Face Trainer",
    ("transformers", "accelerate"),
    "Llama and GPT-2, gradient accumulation, activation checkpointing",
    converted=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    return play(WORKS, tmp_path_factory, "hf_trainer", warm=warm_python, apart=True)


def named(step, site):
    return f"GPT2LMHeadModel.{site}" if step > 3 else site


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)


def test_every_tensor_is_what_it_is_by_hand(seen):
    want = {(step, named(step, site)): row for (step, site), row in seen.case.rows_by_hand().items()}
    assert {step for step, _ in want} == {1, 2, 3, 4, 5, 6}
    check_tensors(seen, want)
    assert "GPT2LMHeadModel.transformer.h.0.attn.c_attn:grad_output" in {site for _, site in want}
    assert "model.layers.1.mlp.down_proj:grad_output" in {site for _, site in want}


def test_loss_norm_and_rate_are_those_that_the_trainer_logs(seen):
    check_logged(seen, [row for rows in seen.watched.said.values() for row in rows])
    assert set(seen.case.run().scalars()["tokens"].tolist()) == {2 * 4 * 32}


def test_its_layers_are_converted(seen):
    check_converted(seen, named=named)
