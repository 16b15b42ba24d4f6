"""Who advances the state: one update per step, whatever the training loop looks like."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tests.compute.nn.layers import adopt_all
from torch import nn

from narrowgauge.compute.nn.conversion.convert import convert
from narrowgauge.compute.nn.linear import clock_of
from narrowgauge.compute.nn.scaling import clock as clock_module
from narrowgauge.compute.recipes import CURRENT, DELAYED
from narrowgauge.errors import NarrowgaugeWarning

RECIPE = DELAYED.with_(history=4)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    model.table = adopt_all(model, RECIPE)
    return model


@pytest.fixture
def model():
    return build()


def backward(model, value=1.0):
    model(torch.full((4, 16), value)).sum().backward()


def history(model, row=0):
    return model.table.history[row].tolist()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def test_filling_gives_exactly_these_histories():
    layer = nn.Sequential(nn.Linear(16, 16, bias=False))
    table = adopt_all(layer, RECIPE)
    optimizer = sgd(layer)
    for k in range(4):
        layer[0].weight.data.fill_(k + 0.5)
        layer(torch.full((4, 16), k + 0.25)).backward(torch.full((4, 16), k + 0.75))
        optimizer.step()
    assert table.history.tolist() == [[k + part for k in (3, 2, 1, 0)] for part in (0.25, 0.5, 0.75)]


def test_accumulation_is_one_step(model):
    optimizer = sgd(model)
    for value in (1.0, 5.0, 3.0):
        backward(model, value)
    optimizer.step()
    assert history(model) == [5, 0, 0, 0]
    assert clock_of(model).step == 1


def test_a_layer_without_tokens_keeps_its_history(model):
    optimizer = sgd(model)
    for tokens in (4, 0, 0, 0, 0):
        model(torch.full((tokens, 16), 2.0)).sum().backward()
        optimizer.step()
    assert history(model) == [2, 0, 0, 0]  # input of the first layer
    assert history(model, 5) == [1, 0, 0, 0]  # grad_output of the last


def test_two_optimizers_roll_once(model):
    weights = torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], lr=0.0)
    biases = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.0)
    for value in (1.0, 2.0):
        backward(model, value)
        weights.step()
        biases.step()
    assert history(model) == [2, 1, 0, 0]
    assert clock_of(model).step == 2


def test_a_skipped_step_rolls_nothing(model):
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (1.0, float("inf"), 2.0):
        scaler.scale(model(torch.full((4, 16), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert history(model) == [2, 1, 0, 0]
    assert clock_of(model).step == 2


def test_a_closure_is_one_step(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((4, 16), 1.0 + len(calls))).square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    assert history(model) == [len(calls), 0, 0, 0]


def test_the_optimizer_may_come_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    optimizer = sgd(model)
    model.table = adopt_all(model, RECIPE)
    backward(model)
    optimizer.step()
    assert history(model) == [1, 0, 0, 0]


def test_forwards_without_grad_read_and_never_write(model):
    optimizer = sgd(model)
    backward(model, 2.0)
    optimizer.step()
    before = [t.clone() for t in (model.table.history, model.table.scale, model.table.amax_now)]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(torch.full((4, 16), 100.0))
    model.table.fold()
    after = (model.table.history, model.table.scale, model.table.amax_now)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.step()  # no data: no step
    assert clock_of(model).step == 1


def test_an_evaluation_before_training_sets_no_scale(model):
    with torch.no_grad():
        model(torch.full((4, 16), 100.0))
    assert model.table.scale.tolist() == [0.0] * 6
    backward(model, 1.0)
    assert model.table.scale[0].item() == pytest.approx(1 / 448)


def test_someone_elses_optimizer_does_not_count(model):
    other = nn.Linear(4, 4)
    optimizer = sgd(other)
    backward(model)
    other(torch.ones(4)).sum().backward()
    optimizer.step()
    assert clock_of(model).step == 0
    optimizer.add_param_group({"params": list(model.parameters())})
    optimizer.step()
    assert clock_of(model).step == 1


def test_scales_that_wait_for_an_optimizer_in_vain_are_told_once(model):
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.0)
    for _ in range(7):
        backward(model)
        optimizer.step()
    backward(model)
    with pytest.warns(NarrowgaugeWarning, match=r"took 8 steps, none of which owned a parameter of the converted"):
        optimizer.step()
    backward(model)
    optimizer.step()  # told once


def test_a_model_that_ran_once_does_not_complain_of_other_peoples_training(model):
    backward(model)
    other = nn.Linear(4, 4)
    optimizer = sgd(other)
    for _ in range(10):
        other(torch.ones(4)).sum().backward()
        optimizer.step()


def test_a_strange_optimizer_is_not_told_of_once_the_models_own_has_stepped(model):
    other = nn.Linear(4, 4)
    for optimizer in [sgd(model)] + [sgd(other)] * 10:
        backward(model)
        other(torch.ones(4)).sum().backward()
        optimizer.step()
    assert clock_of(model).step == 1


def test_an_optimizer_inside_the_backward_pass_ends_the_step_after_it(model):
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for step, value in enumerate((1.0, 2.0, 3.0)):
        backward(model, value)
        assert clock_of(model).step == step  # still running: its scales must not move
    model(torch.ones(4, 16))
    assert clock_of(model).step == 3
    assert history(model) == [3, 2, 1, 0]
    assert history(model, 5) == [1, 1, 1, 0]  # grad_output of the last layer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_ends_the_step_that_an_optimizer_ended_inside_the_backward_pass(model, copied):
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in model.parameters()]
    backward(model, 2.0)
    for handle in handles:
        handle.remove()
    twin = copied(model)
    twin(torch.full((4, 16), 8.0))
    twin.table.fold()
    assert history(twin) == [2, 0, 0, 0]
    assert twin.table.amax_now[0] == 8


def test_frozen_layers_follow_the_model_that_is_trained(model):
    for p in model[0].parameters():
        p.requires_grad_(False)
    backward(model)
    sgd(model[1]).step()
    assert history(model) == [1, 0, 0, 0]


def test_frozen_layers_under_a_trained_head():
    body, head = nn.Sequential(nn.Linear(16, 32)), nn.Linear(32, 4)
    body.requires_grad_(False)
    table = adopt_all(body, RECIPE)
    model = nn.Sequential(body, head)
    clock_of(model).follow(model)
    backward(model)  # never reaches the body, whose amaxes count all the same
    sgd(head).step()
    assert table.history[0].tolist() == [1, 0, 0, 0]


def test_convert_follows_the_whole_model_however_little_of_it_is_trained():
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    convert(model, RECIPE)
    optimizer = sgd(model[1])
    for _ in range(2):
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
    assert clock_of(model).step == 2


def test_recipes_without_state_count_steps_too():
    model = nn.Sequential(nn.Linear(16, 16))
    adopt_all(model, CURRENT)
    optimizer = sgd(model)
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert clock_of(model).step == 3


def test_listeners_hear_every_step_once(model):
    heard, clock = [], clock_of(model)

    def listener():
        heard.append(clock.step)

    clock.subscribe(listener)
    clock.subscribe(listener)
    optimizer = sgd(model)
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert heard == [1, 2]


def test_a_copied_model_keeps_time_for_itself(model):
    backward(model, 2.0)
    twin = copy.deepcopy(model)
    assert clock_of(twin) is not clock_of(model)
    sgd(model).step()
    assert (clock_of(model).step, clock_of(twin).step) == (1, 0)
    optimizer = sgd(twin)
    optimizer.step()  # the copy holds the data of the step that was running
    assert clock_of(twin).step == 1
    assert history(twin) == history(model) == [2, 0, 0, 0]


def test_a_pickled_clock_is_a_number():
    clock = clock_module.StepClock()
    clock.step = 7
    assert pickle.loads(pickle.dumps(clock)).step == 7


def test_models_die_and_their_clocks_with_them():
    model = build()
    dead, clock = weakref.ref(model), weakref.ref(clock_of(model))
    optimizer = sgd(model)
    backward(model)
    optimizer.step()
    del model, optimizer
    gc.collect()
    assert dead() is None
    assert clock() is None


def test_one_hook_for_all_clocks():
    before = clock_module._heard
    clock_module.StepClock()
    assert clock_module._heard is before


def test_a_replayed_graph_counts_once_per_step_of_the_optimizer_that_counted_before():
    layer = nn.Linear(4, 4)
    clock = clock_module.StepClock()
    clock.follow(layer)
    one, two = torch.optim.SGD([layer.weight], lr=0.1), torch.optim.SGD([layer.bias], lr=0.1)
    clock.saw_data()
    clock.captured()
    for _ in range(3):  # after the first round nothing is heard of any data
        layer.weight.grad, layer.bias.grad = torch.ones(4, 4), torch.ones(4)
        one.step()
        two.step()
    assert clock.step == 3
