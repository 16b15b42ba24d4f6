"""A resumed run is the uninterrupted run, bit for bit; and when it cannot be, it says so."""

import io

import pytest
import torch

from narrowgauge.compute import recipes
from narrowgauge.compute.nn import convert, load_scaling_state, scaling_state
from narrowgauge.errors import NarrowgaugeWarning

DELAYED = recipes.DELAYED.with_(history=3)
STATIC = recipes.STATIC.with_(refresh_every=2)


def make(gpt, recipe, seed=0):
    model, _ = convert(gpt(seed=seed), recipe)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved(model, optimizer):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.fixture(params=[DELAYED, STATIC, recipes.DELAYED.with_(algorithm="most_recent", initial="one")])
def interrupted(request, gpt, run_steps):
    """(recipe, checkpoint after step 3, losses of steps 4-6, weights after step 6)."""
    model, optimizer = make(gpt, request.param)
    run_steps(model, optimizer, 3, micro=2)
    checkpoint = saved(model, optimizer)
    losses = run_steps(model, optimizer, 3, start=3, micro=2)
    return request.param, checkpoint, losses, model.state_dict(), scaling_state(model)


def assert_same_ending(model, optimizer, interrupted, run_steps):
    _, _, losses, weights, scales = interrupted
    assert run_steps(model, optimizer, 3, start=3, micro=2) == losses
    for expected, found in ((weights, model.state_dict()), (scales, scaling_state(model))):
        assert expected.keys() == found.keys()
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def test_convert_then_load_resumes_bit_for_bit(gpt, run_steps, interrupted):
    recipe, checkpoint, *_ = interrupted
    model, optimizer = make(gpt, recipe, seed=7)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert_same_ending(model, optimizer, interrupted, run_steps)


def test_load_then_convert_resumes_bit_for_bit(gpt, run_steps, interrupted):
    recipe, checkpoint, *_ = interrupted
    model = gpt(seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    convert(model, recipe)
    assert_same_ending(model, optimizer, interrupted, run_steps)


def test_a_flat_state_resumes_bit_for_bit(gpt, run_steps, interrupted):
    recipe, checkpoint, *_ = interrupted
    donor, _ = make(gpt, recipe)
    donor.load_state_dict(checkpoint["model"])
    model, optimizer = make(gpt, recipe, seed=7)
    model.load_state_dict(dict(checkpoint["model"]))
    load_scaling_state(model, scaling_state(donor))
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert_same_ending(model, optimizer, interrupted, run_steps)


def test_the_state_matters(gpt, run_steps):
    """Without it the run is another one, and an optimizer with a past makes that loud."""
    model, optimizer = make(gpt, DELAYED)
    run_steps(model, optimizer, 3)
    checkpoint = saved(model, optimizer)
    losses = run_steps(model, optimizer, 3, start=3)
    other = gpt(seed=7)
    other.load_state_dict(dict(checkpoint["model"]))  # what drops the metadata
    convert(other, DELAYED)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    optimizer.load_state_dict(checkpoint["optimizer"])
    with pytest.warns(NarrowgaugeWarning, match=r"already taken 3 steps, but the model's scales are new"):
        assert run_steps(other, optimizer, 3, start=3) != losses


def test_saving_in_the_middle_of_an_accumulation_keeps_the_running_amax(gpt, run_steps):
    model, optimizer = make(gpt, DELAYED)
    run_steps(model, optimizer, 2)
    model(torch.arange(16)[None]).square().sum().backward()
    state = scaling_state(model)
    assert (state["narrowgauge.blocks.0.up.amax_now"] > 0).all()
    other, _ = make(gpt, DELAYED, seed=7)
    load_scaling_state(other, state)
    assert all(torch.equal(state[key], value) for key, value in scaling_state(other).items())


def test_saving_between_the_backward_pass_and_the_step_loses_no_step(gpt, run_steps):
    model, optimizer = make(gpt, DELAYED)
    run_steps(model, optimizer, 2)
    model(torch.arange(16)[None]).square().sum().backward()
    other, other_optimizer = make(gpt, DELAYED, seed=7)
    other.load_state_dict(model.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.clone()
    other_optimizer.load_state_dict(optimizer.state_dict())
    for each in (optimizer, other_optimizer):
        each.step()
    expected = scaling_state(model)
    assert all(torch.equal(expected[key], value) for key, value in scaling_state(other).items())


def test_saving_ends_the_step_of_an_optimizer_that_stepped_inside_the_backward_pass(gpt):
    model, _ = make(gpt, DELAYED)
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    model(torch.arange(16)[None]).square().sum().backward()
    saved_before = scaling_state(model)
    saved_inside = model.state_dict()._metadata["blocks.0.up"]["narrowgauge"]
    model(torch.arange(16)[None])
    assert saved_before["narrowgauge.blocks.0.up.steps"] == saved_inside["steps"] == 1
    assert (saved_before["narrowgauge.blocks.0.up.amax_now"] == -1).all()
    assert (saved_before["narrowgauge.blocks.0.up.history"][:, 0] > 0).all()
