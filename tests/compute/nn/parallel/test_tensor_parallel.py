"""Layers cut over ranks are, where scales are the same and sums exact, bit by bit the layer in one piece."""

import pytest
import torch
from tests.compute.nn.layers import sqnr_db
from tests.compute.nn.parallel.model import (
    CASES,
    LAYERS,
    RECIPES,
    STEPS,
    Model,
    batch,
    data,
    in_one_piece,
    layer,
    optimizer_of,
)
from tests.compute.nn.parallel.ranks import play
from torch import nn

import narrowgauge as ng


@pytest.fixture(scope="module")
def ranks(warm_python, tmp_path_factory):
    return play(warm_python, tmp_path_factory.mktemp("tensor"), "tensor_parallel.py", world=4)


def three_steps(model, name):
    """y, dx, dw and db of each; the weights stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for step in range(3):
        x, dy = data(name, step)
        x.requires_grad_()
        y = model(x)
        y.backward(dy)
        found += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found, ng.scaling_state(model)


@pytest.mark.parametrize(("name", "style"), [case for case in CASES if case[0] != "current"])
def test_the_same_bits_as_in_one_piece(ranks, name, style):
    want, state = three_steps(ng.convert(nn.Sequential(layer(name)), LAYERS[name][1])[0], name)
    exact, _ = three_steps(nn.Sequential(layer(name)), name)
    assert not torch.equal(want[0], exact[0])  # FP8 does round here
    assert bool(state) == (name == "delayed")
    for found in ranks:
        got, got_state = found[name, style]
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), i
        assert got_state.keys() == state.keys()
        assert all(torch.equal(got_state[key], state[key]) for key in state)


@pytest.mark.parametrize("style", ["columns", "rows"])
def test_parts_with_scales_of_their_own_are_as_near_to_the_exact_product(ranks, style):
    want, _ = three_steps(ng.convert(nn.Sequential(layer("current")), LAYERS["current"][1])[0], "current")
    exact, _ = three_steps(nn.Sequential(layer("current")), "current")
    for found in ranks:
        for got, one_piece, right in zip(found["current", style][0], want, exact, strict=True):
            if torch.equal(one_piece, right):  # gradients of a bias are not quantized
                assert torch.equal(got, right)
            else:
                assert sqnr_db(right, got) > sqnr_db(right, one_piece) - 1
                assert sqnr_db(one_piece, got) > 20


def test_a_model_of_which_some_layers_are_cut(ranks):
    model, _ = ng.convert(Model(), RECIPES["delayed"])
    optimizer, want = optimizer_of(model), []
    for step in range(STEPS):
        loss = model(batch(step, 0)).square().mean()
        loss.backward()
        want.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks:
        losses, weights, state, _ = found["cut"]
        assert losses == pytest.approx(want, rel=1e-2)
        assert state.keys() == ng.scaling_state(model).keys()
        for name, p in model.named_parameters():
            assert (weights[name] - p).norm() < 1e-2 * p.norm(), name


@pytest.mark.parametrize(
    "which", ["cut and sharded", "sharded, then converted", "cut and replicated", "cut and copied"]
)
def test_cut_and_sharded_along_two_dimensions(ranks, which):
    model, _ = ng.convert(Model(), RECIPES["delayed"])
    want, _, want_weights, want_state = in_one_piece(model, range(STEPS))
    for rank, found in enumerate(ranks):
        losses, weights, state, _ = found[which]
        assert losses == pytest.approx(want[rank // 2], rel=1e-2)
        assert state.keys() == want_state.keys()
        for name, p in want_weights.items() if which != "cut and copied" else ():  # whose parts are plain tensors
            assert (weights[name] - p).norm() < 1e-2 * p.norm(), name
        for key, other in ranks[0][which][2].items():
            assert torch.equal(state[key], other), key  # all ranks have the same scales


def test_copied_along_one_dimension_and_sharded_along_the_other(ranks):
    """Neighbours see the same batch here, so that two batches are all there is: sums of four are exact."""
    model, _ = ng.convert(Model(), RECIPES["delayed"])
    losses, _, want_weights, want_state = in_one_piece(model, range(STEPS))
    for rank, found in enumerate(ranks):
        mine, weights, state, copies = found["hybrid"]
        assert mine == losses[rank // 2]
        assert weights.keys() == want_weights.keys()
        assert state.keys() == want_state.keys()
        for name, p in want_weights.items():
            assert torch.equal(weights[name], p), name
        for name, scale in want_state.items():
            assert torch.equal(state[name], scale), name
        assert {each["weight"] for each in copies.values()} == {0}  # all ranks have the gathered one


def test_who_has_the_same_operands(ranks):
    """Ranks 0 1 / 2 3: tensor parallel are neighbours, FSDP2 gathers from the rank below."""
    for rank, found in enumerate(ranks):
        first = rank - rank % 2
        up = {"input": first, "weight": None, "grad_output": None}
        down = {"input": None, "weight": None, "grad_output": first}
        layers = {f"blocks.{i}.{name}": x for i in (0, 1) for name, x in (("up", up), ("down", down))}
        assert found["cut"][3] == layers | {"last": {}}
        up, down = up | {"weight": rank % 2}, down | {"weight": rank % 2}
        for which in ("cut and sharded", "sharded, then converted"):
            copies = found[which][3]
            assert copies["blocks.1.up"] == up
            assert copies["blocks.1.down"] == down
            assert copies["last"] == {"weight": rank % 2}
