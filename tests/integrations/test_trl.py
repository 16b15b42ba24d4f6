"""TRL's SFTTrainer with a LoRA of PEFT, in float32 and in its default BF16: frozen layers and adapters, both seen."""

import pytest
from tests.integrations.watched import check_converted, check_logged, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "TRL SFTTrainer",
    ("trl", "transformers", "peft", "datasets"),
    "Llama with LoRA, in float32 and in its default BF16 (there without its head), accumulation",
    converted=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


SECOND = "PeftModel1."  # before the names of a later model's layers
HEAD = "base_model.model.lm_head"


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    return play(WORKS, tmp_path_factory, "trl_sft", warm=warm_python, really=False, KEEP_HEADS="1")


def named(step, site):
    return SECOND + site if step > 3 else site


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)


def test_every_tensor_is_what_it_is_by_hand(seen):
    want = {(step, named(step, site)): row for (step, site), row in seen.case.rows_by_hand().items()}
    check_tensors(seen, want)
    # TRL multiplies by the head's weight in pieces, inside of its loss: no call of that layer, no gradient of its own.
    heads = {(step, site) for step, site in want if HEAD in site}
    assert heads == {(step, f"{HEAD}:{role}") for step in range(1, 4) for role in ("input", "weight")}
    assert f"{SECOND}{HEAD}" in " ".join(seen.case.run().meta["notes"])  # in BF16 it is cast before, piece by piece
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    sites = {site for _, site in want}
    assert {f"{layer}.base_layer:weight", f"{SECOND}{layer}.lora_A.default:grad_output"} <= sites


def test_loss_norm_and_rate_are_those_that_the_trainer_logs(seen):
    check_logged(seen, seen.watched.said)


def test_its_layers_are_converted(seen):
    check_converted(seen, named=named)
    rows = {row["name"]: row for row in seen.case.run("converted").meta["conversion"]}
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    for name in (layer, SECOND + layer):
        assert rows[f"{name}.base_layer"]["recipe"] == "current"
        assert rows[f"{name}.lora_A.default"]["reason"] == "low-rank adapter: too small to gain"
