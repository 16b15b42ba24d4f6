"""A converted model under FSDP2 on two ranks is, bit by bit, the one in one piece that sees both batches."""

import pytest
import torch
from tests.compute.nn.parallel.model import RECIPES, STEPS, Model, batch, in_one_piece
from tests.compute.nn.parallel.ranks import play

import narrowgauge as ng


@pytest.fixture(scope="module")
def ranks(warm_python, tmp_path_factory):
    return play(warm_python, tmp_path_factory.mktemp("fsdp2"), "fsdp2.py")


def assert_same(ranks, which, want):
    losses, grads, weights, state = want
    for rank, found in enumerate(ranks):
        assert found[which]["losses"] == losses[rank]
        for got, expected in zip(found[which]["grads"], grads, strict=True):
            assert_equal(got, expected)
        assert_equal(found[which]["weights"], weights)
        assert_equal(found[which]["state"], state)


def assert_equal(found, want):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("first", ["convert", "shard"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_as_in_one_piece(ranks, recipe, first):
    model, _ = ng.convert(Model(), RECIPES[recipe])
    assert_same(ranks, (recipe, first), in_one_piece(model, range(STEPS)))
    for found in ranks:
        assert found[recipe, first]["class"] == "FSDPFp8Linear"
        assert found[recipe, first]["keys"] == list(Model().state_dict())


def test_microbatches_and_recomputed_blocks(ranks):
    model, _ = ng.convert(Model(), RECIPES["delayed"])
    assert_same(ranks, "micro", in_one_piece(model, range(STEPS), micro=2))


def test_no_codes_of_a_weight_outlive_its_use(ranks):
    for found in ranks:
        assert found["kept"] == [True] * 5
        assert sorted(found["saved"]) == [(32, 8)] * 3 + [(64, 8)] * 2  # of five inputs, turned, and of no weight


def test_it_goes_on_where_it_was_interrupted(ranks):
    for found in ranks:
        straight = found["delayed", "shard"]
        assert found["resumed"]["losses"] == straight["losses"][2:]
        assert_equal(found["resumed"]["weights"], straight["weights"])
        assert_equal(found["resumed"]["state"], straight["state"])


def test_in_bf16_the_weight_is_quantized_as_it_is_multiplied(ranks):
    model, _ = ng.convert(Model().bfloat16(), "current")
    losses = [model(batch(0, who).bfloat16()).square().mean().item() for who in range(2)]
    assert [found["bf16"]["losses"] for found in ranks] == [[loss] for loss in losses]


def test_products_that_stay_high(ranks):
    model, _ = ng.convert(Model(), "current", high=[{"sites": ["last"], "gemms": ["wgrad"]}])
    assert_same(ranks, "switched", in_one_piece(model, range(STEPS)))


def test_reverting_gives_the_classes_that_were_there(ranks):
    for found in ranks:
        assert found["reverted"] == ["FSDPLinear", "True", "<class 'torch.nn.modules.linear.Linear'>"]
