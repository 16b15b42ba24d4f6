"""Hugging Face's Trainer with a mixture of experts: Mixtral, whose experts are two parameters in grouped products."""

import pytest
from tests.integrations.watched import check_converted, check_logged, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Hugging Face Trainer",
    ("transformers", "accelerate"),
    "Mixtral, experts in `grouped_mm` (not converted), gradient accumulation",
    converted=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    return play(WORKS, tmp_path_factory, "hf_moe", warm=warm_python, really=False, apart=True)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)
    assert seen.watched.said["experts"] == "grouped_mm"


def test_every_tensor_of_experts_routers_and_attention_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    parts = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate", "self_attn.q_proj")
    sites = {site for _, site in want}
    assert {f"model.layers.1.{part}:{role}" for part in parts for role in ("input", "weight", "grad_output")} <= sites
    scales = want[1, "model.layers.1.mlp.experts.down_proj:weight"]
    assert scales["scale_min"] < scales["scale_max"]  # each expert has its own


def test_loss_norm_and_rate_are_those_that_the_trainer_logs(seen):
    check_logged(seen, seen.watched.said["logged"])


def test_its_other_layers_are_converted(seen):
    check_converted(seen)
