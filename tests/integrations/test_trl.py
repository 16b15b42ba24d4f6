"""TRL's SFTTrainer with a LoRA of PEFT: frozen layers and adapters, both seen."""

import pytest
from tests.integrations.watched import check_converted, check_logged, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "TRL SFTTrainer",
    ("trl", "transformers", "peft", "datasets"),
    "Llama with LoRA, gradient accumulation",
    converted=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    return play(WORKS, tmp_path_factory, "trl_sft", warm=warm_python, really=False)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)


def test_every_tensor_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    sites = {site for _, site in want}
    head = {key: row for key, row in seen.case.rows().items() if key[1].startswith("base_model.model.lm_head:")}
    check_tensors(seen, want | head)
    # TRL multiplies by the head's weight in pieces, inside of its loss: no call of that layer, no gradient of its own.
    assert {site.rpartition(":")[2] for _, site in head} == {"input", "weight"}
    weights = [row["amax"] for (_, site), row in head.items() if site.endswith(":weight")]
    assert weights == pytest.approx([seen.watched.said["head"]] * 3, rel=1e-6)
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    assert {f"{layer}.base_layer:weight", f"{layer}.lora_A.default:grad_output"} <= sites


def test_loss_norm_and_rate_are_those_that_the_trainer_logs(seen):
    check_logged(seen, seen.watched.said["logged"])


def test_its_layers_are_converted(seen):
    check_converted(seen)
    rows = {row["name"]: row for row in seen.case.run("converted").meta["conversion"]}
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    assert rows[f"{layer}.base_layer"]["recipe"] == "current"
    assert rows[f"{layer}.lora_A.default"]["reason"] == "low-rank adapter: too small to gain"
