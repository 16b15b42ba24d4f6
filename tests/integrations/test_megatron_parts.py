"""Megatron-Core's stages and experts: each rank counts its own from 0, and the run has them as the whole has."""

import pytest
from tests.integrations.differences import differences
from tests.integrations.watched import NEAR, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Megatron-Core", ("megatron-core",), "its `GPTModel` in two pipeline stages; its experts, two on each rank", ranks=2
)
STAGES = 3  # steps of the pipeline; the experts' come after

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
    return play(WORKS, tmp_path_factory, "megatron_parts", launcher, warm_python, really=False)


def test_every_layer_has_its_name_in_the_whole_and_the_values_by_hand(seen):
    assert seen.watched.code == 0, seen.watched.err
    assert seen.watched.said == seen.case.alone().said  # what counts by hand moves memory, and with it last digits
    want = seen.case.rows_by_hand()
    layer = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    names = {f"decoder.layers.{i}.{name}" for i in range(4) for name in layer} | {"output_layer"}
    experts = {f"experts.local_experts.{i}.linear_fc{n}" for i in range(4) for n in (1, 2)}
    assert {site.partition(":")[0] for step, site in want if step <= STAGES} == names
    assert {site.partition(":")[0] for step, site in want if step > STAGES} == experts
    assert want[1, "decoder.layers.3.mlp.linear_fc1:weight"] != want[1, "decoder.layers.1.mlp.linear_fc1:weight"]
    found = {(step, site.removeprefix("Experts.")): row for (step, site), row in seen.case.rows(ranks=[1]).items()}
    assert differences(found, want, NEAR) == []


def test_losses_are_those_of_the_last_stage_and_tokens_count_once(seen):
    found = seen.case.run().scalars()
    assert found["loss"][:STAGES].tolist() == pytest.approx(seen.watched.said, rel=1e-5)
    assert found["tokens"][:STAGES].tolist() == [4 * 31] * STAGES
    assert set(found["microbatches"].tolist()) == {1}
