"""Whose a backward pass is, as the model that is watched and its optimizers are at each call."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from narrowgauge.session.steps.others import Others
from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.tensors.of_modules import ids_of


class Watched:
    """A model that is watched, its optimizer, and others beside them."""

    def __init__(self, model=None):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model
        self.other = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.trained = Trained()
        self.trained.add(self.optimizer)
        self.others = Others(self.model, self.trained, lambda: 7)
        assert self.others.made([*self.other.parameters()])
        assert not self.others.made([*self.model.parameters()])

    def theirs(self, *reached):
        """Whether a loss that reaches the others' parameters, and these, is theirs; the answers agree."""
        loss = sum((p.sum() for p in reached), self.other(torch.ones(4)).sum())
        found = self.others.learn_from(loss)
        held = {id(p) for p in (*reached, *self.other.parameters()) if p.requires_grad}
        assert found == self.others.hold(frozenset(held))
        assert self.trained.holds(held) == (not held.isdisjoint(self.trained.ids()))
        return found


@pytest.fixture
def watched():
    return Watched()


def test_of_either_and_of_both(watched):
    assert watched.theirs()
    assert not watched.theirs(watched.model[1].bias)
    assert not watched.others.learn_from(watched.model(torch.ones(4)).sum())
    assert not watched.others.learn_from([watched.other(torch.ones(4)).sum(), watched.model[0].weight.sum()])
    assert not watched.others.learn_from(torch.ones(4, requires_grad=True).sum())  # nobody's


@pytest.mark.parametrize("how", ["as an attribute", "by its name", "in a layer", "in its table"])
def test_a_parameter_that_the_program_adds_and_takes_away(watched, how):
    fresh, model = nn.Parameter(torch.ones(3)), watched.model
    assert watched.theirs(fresh)
    if how == "as an attribute":
        model.fresh = fresh
    elif how == "by its name":
        model[0].register_parameter("fresh", fresh)
    elif how == "in a layer":
        model.append(nn.Linear(4, 4))
        model[2].weight = fresh
    else:
        model[1]._parameters["fresh"] = fresh
    assert not watched.theirs(fresh)
    if how == "as an attribute":
        del model.fresh
    elif how == "in a layer":
        del model[2]
    else:
        model[how == "in its table"]._parameters.pop("fresh")
    assert watched.theirs(fresh)


def test_what_is_frozen_is_not_reached_until_it_trains(watched):
    own = watched.model[0].weight.requires_grad_(False)
    assert watched.theirs(own)
    own.requires_grad_()
    assert not watched.theirs(own)


@pytest.mark.parametrize("how", ["add_param_group", "append", "another list"])
def test_a_group_of_its_optimizer(watched, how):
    fresh, groups = nn.Parameter(torch.ones(3)), watched.optimizer.param_groups
    assert watched.theirs(fresh)
    before = groups[0]["params"]
    if how == "add_param_group":
        watched.optimizer.add_param_group({"params": [fresh]})
    elif how == "append":
        before.append(fresh)
    else:
        groups[0]["params"] = [fresh]
    assert not watched.theirs(fresh)
    assert not watched.theirs(watched.model[0].weight)
    groups[:] = [{**groups[0], "params": [p for p in before if p is not fresh]}]
    assert watched.theirs(fresh)


def test_parameters_that_are_replaced_are_its_optimizers_as_long_as_that_lives(watched):
    old = [p for p in watched.model.parameters()]  # noqa: C416 - one more name would hold the last of them
    for layer in watched.model:
        layer.weight, layer.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    assert not watched.theirs(old[0])
    assert not watched.theirs(watched.model[1].bias)
    watched.optimizer.param_groups[0]["params"] = [*watched.model.parameters()]
    assert not watched.theirs(old[0])  # which it was made with
    watched.optimizer = None
    gc.collect()
    assert watched.theirs(old[0])
    assert not watched.theirs(watched.model[1].bias)


def test_a_module_is_passed_by_as_long_as_it_owns_nothing(watched):
    trained, other, groups = watched.trained, watched.other, watched.optimizer.param_groups
    assert not trained.passes_by(other)  # it has not been asked for copies
    assert not trained.owns(other)
    assert trained.passes_by(other)
    groups[0]["params"].append(other.bias)
    assert not trained.passes_by(other)
    groups[0]["params"].pop()
    assert trained.passes_by(other)
    weight, other.weight = other.weight, watched.model[0].weight
    assert not trained.passes_by(other)
    other.weight = weight
    assert trained.passes_by(other)
    other.parameters = lambda recurse=True: iter([watched.model[0].bias])
    assert not trained.passes_by(other)
    del other.parameters
    trained.changed()  # and may have copies now
    assert not trained.passes_by(other)


def test_another_optimizer_is_made_and_goes(watched):
    fresh = nn.Parameter(torch.ones(3))
    assert watched.theirs(fresh)
    second = torch.optim.SGD([fresh], lr=0.1)
    watched.trained.add(second)
    assert not watched.theirs(fresh)
    del second
    gc.collect()
    assert watched.theirs(fresh)


def test_copies_that_are_trained_in_its_place(watched):
    copied = nn.Linear(8, 8).to(torch.bfloat16)
    assert watched.theirs(copied.weight)
    masters = torch.optim.SGD([p.detach().float() for p in copied.parameters()], lr=0.1)
    watched.trained.add(masters)
    assert watched.theirs(copied.weight)  # of which nobody knows yet
    assert watched.trained.owns(copied)
    assert not watched.theirs(copied.weight)


def test_a_shared_parameter_is_its_own_while_it_is_shared(watched):
    own, watched.other.weight = watched.other.weight, watched.model[0].weight
    assert not watched.theirs()
    watched.other.weight = own
    assert watched.theirs()
    watched.model[1].weight = own  # in which no optimizer of it has a part
    assert not watched.theirs()


def test_a_shared_layer(watched):
    watched.model.append(nn.Sequential(watched.other))
    assert not watched.theirs()
    watched.model[2][0] = nn.Identity()
    assert watched.theirs()


def test_of_a_model_that_is_gone(watched):
    last = watched.model[1].bias
    watched.model = watched.optimizer = None
    gc.collect()
    assert watched.others.gone is None
    assert watched.theirs(last)
    assert watched.others.gone == 7


def test_what_no_graph_shows_is_its_own(watched):
    x = torch.ones(4, requires_grad=True)
    assert not watched.others.learn_from(checkpoint(watched.other, x, use_reentrant=True).sum())
    assert watched.others.learn_from(checkpoint(watched.other, x, use_reentrant=False).sum())


def test_on_the_meta_device_an_optimizer_holds_nothing():
    watched = Watched()
    meta = nn.Parameter(torch.ones(3, device="meta"))
    watched.optimizer.add_param_group({"params": [meta]})
    assert watched.others.learn_from(meta.sum())
    watched.trained.add(watched.optimizer)
    assert watched.others.learn_from(meta.sum())
    watched.model.meta = meta
    assert not watched.others.learn_from(meta.sum())


class Lists(nn.Module):
    """What it calls its parameters is in no table."""

    def __init__(self):
        super().__init__()
        self.held = [nn.Parameter(torch.ones(2))]

    def parameters(self, recurse=True):
        return iter(self.held)


class Hides(nn.Linear):
    """Nobody is to find its parameters in what it is a part of."""

    def named_modules(self, *args, **kwargs):
        return iter(())


def shared():
    layer = nn.Linear(2, 2, bias=False)
    return nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.Linear(2, 2))})


def by_an_attribute():
    model = nn.Linear(2, 2)
    model.parameters = lambda recurse=True: iter([model.bias])
    return model


def with_nothing_in_its_place():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_module("none", None)
    model.register_parameter("none_either", None)
    return model


def round_about():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].around = model
    return model


@pytest.mark.parametrize(
    "make",
    [
        shared,
        by_an_attribute,
        with_nothing_in_its_place,
        round_about,
        Lists,
        nn.Identity,
        lambda: nn.Sequential(Lists(), nn.Linear(2, 2)),
        lambda: nn.Sequential(Hides(2, 2), nn.Linear(2, 2)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
        lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.TransformerDecoderLayer(8, 2, 8),
        lambda: nn.LazyLinear(2),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_ids_are_those_of_what_torch_calls_a_module_s_parameters(make):
    model = make()
    parameters = [*model.parameters()]
    assert ids_of(model) == {id(p) for p in parameters}


def test_a_model_with_its_own_word_on_its_parameters():
    watched = Watched(Lists())
    assert not watched.theirs(watched.model.held[0])
    watched.model.held.append(nn.Parameter(torch.ones(2)))
    assert not watched.theirs(watched.model.held[1])
    last = watched.model.held.pop()
    assert watched.theirs(last)
