"""Megatron-Core's GPTModel on two ranks, each of which multiplies its share of every layer."""

import pytest
from tests.integrations.watched import check_refused, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Megatron-Core", ("megatron-core",), "its `GPTModel` and backward, tensor parallel 2, accumulation", ranks=2
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
    return play(WORKS, tmp_path_factory, "megatron_gpt", launcher, warm_python, really=False)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)


def test_every_tensor_of_both_ranks_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    layer = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    names = {f"decoder.layers.{i}.{name}" for i in range(2) for name in layer}
    assert {site.partition(":")[0] for _, site in want} == names | {"output_layer"}
    ranks = seen.case.each_by_hand()
    weight = 1, "decoder.layers.1.mlp.linear_fc1:weight"
    assert ranks[0][weight] != ranks[1][weight]
    assert want[weight]["numel"] == 32 * 128  # the shares of both


def test_rate_norm_and_tokens_are_what_they_are_by_hand(seen):
    check_scalars(seen, same_data=True)


def test_losses_are_those_of_the_script(seen):
    found = seen.case.run().scalars()
    assert found["loss"].tolist() == pytest.approx(seen.watched.said, rel=1e-5)
    assert set(found["microbatches"].tolist()) == {2}


def test_a_conversion_finds_none_of_its_layers_and_ends_the_program_in_words(seen):
    kinds = "ColumnParallelLinear, Embedding, LayerNorm, RowParallelLinear, VocabParallelEmbedding"
    said = f"GPTModel has no linear layer to convert; its parameters are in modules of class {kinds}."
    check_refused(seen.case, seen.case.converted(hand=False), said)
