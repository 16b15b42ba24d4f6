"""What became of the layers of several models, each by the name that its sites have, and what the models are given."""

from itertools import pairwise

import pytest
import torch
from tests.session.around import Around
from tests.session.inline import followed
from torch import nn

NARROW = "N=10 is not a multiple of 16, which FP8 gemms need"


class Actor(nn.Module):
    def __init__(self, trunk=None):
        super().__init__()
        self.trunk = trunk or nn.Sequential(nn.Linear(32, 32))
        self.pi = nn.Linear(32, 32)

    def forward(self, x):
        return self.pi(self.trunk(x))


class Critic(nn.Module):
    def __init__(self, trunk=None, features=32):
        super().__init__()
        self.trunk = trunk or nn.Sequential(nn.Linear(32, features))
        self.value = nn.Linear(features, 10)

    def forward(self, x):
        return self.value(self.trunk(x))


def train(*models, steps=2):
    parameters = {id(p): p for model in models for p in model.parameters()}
    optimizer = torch.optim.SGD([*parameters.values()], lr=0.1)
    for _ in range(steps):
        for model in models:
            model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def facts_of(tmp_path, models, **convert):
    """The facts of a session in which these were trained, and the sites that it recorded."""
    with followed(tmp_path, recipe="rowwise", judge="current", every=1, convert=convert) as (session, writer):
        train(*models)
    return session.facts(), {site for _, sites, _ in writer.tensors for site in sites}


def after_each_other(tmp_path, *shapes):
    """The facts of a session in which models of linear layers of these shapes came and went."""
    with followed(tmp_path, recipe="rowwise", judge="current", every=1) as (session, _):
        for shape in shapes:
            train(nn.Sequential(*(nn.Linear(k, n) for k, n in pairwise(shape))))
    return session.facts()


def told(facts):
    return {row["name"]: row["recipe"] for row in facts["conversion"]}


def layers(sites):
    return {site.rpartition(":")[0] for site in sites if site.endswith(":weight")}


def test_a_model_that_cannot_be_converted_is_told_layer_by_layer(tmp_path):
    facts, sites = facts_of(tmp_path, (Actor(), Critic(features=10)))
    assert told(facts) == {"trunk.0": "rowwise", "pi": "rowwise", "Critic.trunk.0": None, "Critic.value": None}
    assert told(facts).keys() == layers(sites)
    assert {row["reason"] for row in facts["conversion"] if not row["recipe"]} == {NARROW}
    assert [(each["model"], each["converted"], each["linears"]) for each in facts["conversion_summary"]] == [
        ("Actor", 2, 2),
        ("Critic", 0, 2),
    ]
    (note,) = [note for note in facts["notes"] if "stays in the baseline's precision" in note]
    assert note.startswith("One of the script's models stays in the baseline's precision: none of the 2 linear layers")
    assert facts["refusal"] == ""


def test_so_is_the_first_one_while_another_is_still_to_come(tmp_path):
    facts, sites = facts_of(tmp_path, (Critic(features=10), Actor()))
    assert told(facts) == {"trunk.0": None, "value": None, "Actor.trunk.0": "rowwise", "Actor.pi": "rowwise"}
    assert told(facts).keys() == layers(sites)


def test_a_glob_that_a_model_has_not_is_why_its_layers_stay_high(tmp_path):
    facts, _ = facts_of(tmp_path, (Actor(), Critic()), skip=["pi"])
    assert told(facts) == {"trunk.0": "rowwise", "pi": None, "Critic.trunk.0": None, "Critic.value": None}
    reasons = {row["name"]: row["reason"] for row in facts["conversion"]}
    assert reasons["Critic.value"] == "skip 'pi' matches no module of the model"


@pytest.mark.parametrize(("features", "recipe"), [(32, "rowwise"), (10, None)])
def test_a_layer_that_two_models_share_is_the_first_ones(tmp_path, features, recipe):
    trunk = nn.Sequential(nn.Linear(32, features), nn.Linear(features, 32))
    facts, sites = facts_of(tmp_path, (Actor(trunk), Around(Actor(trunk))))
    assert told(facts) == {"trunk.0": recipe, "trunk.1": recipe, "pi": "rowwise", "Around.inner.pi": "rowwise"}
    assert len(facts["conversion"]) == 4
    assert told(facts).keys() == layers(sites)


def test_what_only_wraps_another_model_is_none_that_stays_high(tmp_path):
    inner = Critic()
    facts, _ = facts_of(tmp_path, (inner, Around(inner)))
    assert told(facts) == {"trunk.0": "rowwise", "value": None}
    assert not [note for note in facts["notes"] if "stays in the baseline's precision" in note]


def test_a_model_with_only_a_head_of_its_own_is_told_to_share_the_rest(tmp_path):
    trunk = nn.Sequential(nn.Linear(32, 32))
    facts, _ = facts_of(tmp_path, (Actor(trunk), Critic(trunk)))
    assert told(facts) == {"trunk.0": "rowwise", "pi": "rowwise", "Critic.value": None}
    (note,) = [note for note in facts["notes"] if "stays in the baseline's precision" in note]
    assert "precision, but for what it shares with another: none of" in note


def test_other_names_of_a_row_are_those_of_the_run(tmp_path):
    critic = Critic()
    critic.again = critic.trunk[0]
    critic.tied = nn.Linear(32, 32)
    critic.tied.weight = critic.trunk[0].weight
    facts, _ = facts_of(tmp_path, (Actor(), critic))
    rows = {row["name"]: row for row in facts["conversion"]}
    assert rows["Critic.trunk.0"]["aliases"] == ["Critic.again"]
    assert rows["Critic.trunk.0"]["shared_with"] == ["Critic.tied"]
    assert facts["conversion_summary"][1]["never_called"] == ["Critic.tied"]


def test_models_that_came_before_keep_their_rows(tmp_path):
    facts = after_each_other(tmp_path, (32, 32, 32), (32, 32, 32), (32, 48, 10))
    rows = [(row["name"], row["shape"], row["recipe"]) for row in facts["conversion"]]
    assert rows == [
        ("0", [32, 32], "rowwise"),
        ("1", [32, 32], "rowwise"),
        ("0", [48, 32], "rowwise"),
        ("1", [10, 48], None),
    ]


def test_a_model_that_stays_high_after_one_in_fp8_takes_nothing_away(tmp_path):
    facts = after_each_other(tmp_path, (32, 32), (32, 10))
    assert [(row["name"], row["recipe"]) for row in facts["conversion"]] == [("0", "rowwise"), ("0", None)]
    assert facts["refusal"] == ""
    assert facts["emulated"]


def test_of_models_that_are_gone_a_limited_number_of_layers_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.session.models.layer_rows.MOST_GONE", 1)
    facts = after_each_other(tmp_path, (32, 16), (32, 32), (32, 48), (32, 64))
    assert [row["shape"] for row in facts["conversion"]] == [[16, 32], [64, 32]]
    assert "Of layers of models that are gone 1 are told; there were more." in facts["notes"]


# ------------------------------------------------------------------------------------------------ what they are given


def both(x):
    return lambda actor, critic: actor(x).square().mean() + critic(x).square().mean()


def reshaped(x):
    return lambda actor, critic: actor(x.view(2, 8, 32)).square().mean() + critic(x).square().mean()


def twice_by_one(x):
    return lambda actor, critic: actor(x).square().mean() + critic(x).square().mean() + actor(x).abs().mean()


def each_its_own(x):
    return lambda actor, critic: actor(x[:8]).square().mean() + critic(x[8:]).square().mean()


def parts(x):
    return lambda actor, critic: actor.trunk(x).square().mean() + actor.pi(x).square().mean()


@pytest.mark.parametrize(
    ("loss_of", "samples"), [(both, 16), (reshaped, 2), (twice_by_one, 32), (each_its_own, 16), (parts, 16)]
)
@pytest.mark.parametrize("same_memory", [False, True])
def test_a_batch_that_goes_to_several_models_counts_once(tmp_path, loss_of, samples, same_memory):
    """Two microbatches a step, whose batches may lie in the same memory, one after the other."""
    torch.manual_seed(0)
    with followed(tmp_path) as (_, writer):
        actor, critic = Actor(), Critic()
        optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
        x = torch.empty(16, 32)
        for _ in range(3):
            for _ in range(2):
                x = x.copy_(torch.randn(16, 32)) if same_memory else torch.randn(16, 32)
                loss_of(x)(actor, critic).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert writer.column("tokens") == dict.fromkeys((1, 2, 3), 2 * samples)


def test_a_batch_that_models_take_in_turn_counts_in_each_step(tmp_path):
    with followed(tmp_path) as (_, writer):
        models = Actor(), Critic()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(2):
            x = torch.randn(16, 32)
            for model, optimizer in zip(models, optimizers, strict=True):
                model(x).square().mean().backward()
                optimizer.step()
    assert writer.column("tokens") == dict.fromkeys((1, 2, 3, 4), 16)


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_trained_model_that_is_frozen_teaches_and_leaves_nothing_in_the_step(tmp_path, by_name, recipe):
    """But where gradients go through it, as through a frozen discriminator."""
    with followed(tmp_path, every=1, recipe=recipe, judge="current") as (_, writer):
        teacher, student = Actor(), Critic()
        train(teacher, steps=1)
        optimizer = torch.optim.SGD([*teacher.parameters(), *student.parameters()], lr=0.1)
        teacher.requires_grad_(False)
        for _ in range(2):
            seen = torch.randn(4, 32)
            taught = teacher(x=seen) if by_name else teacher(seen)
            assert not taught.requires_grad
            (student(torch.randn(16, 32)).square().mean() + taught.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        x = torch.randn(8, 32, requires_grad=True)
        (teacher(x=x) if by_name else teacher(x)).square().mean().backward()
        student(x).square().mean().backward()
        optimizer.step()
    assert writer.column("tokens") == {1: 16, 2: 16, 3: 16, 4: 8}
    operands = [table for table in writer.tensors if layers(table[1])]  # and not the results of converted layers
    of_student = {"Critic.trunk.0", "Critic.value"}
    sites = {step: layers(sites) for step, sites, _ in operands}
    assert sites == {1: {"trunk.0", "pi"}, 2: of_student, 3: of_student, 4: of_student | {"trunk.0", "pi"}}
    numel = {step: dict(zip(sites, columns["numel"], strict=True)) for step, sites, columns in operands}
    assert numel[1]["trunk.0:input"] == 16 * 32, "what it taught before step 2 began is not of step 1"
