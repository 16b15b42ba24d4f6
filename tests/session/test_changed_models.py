"""A program adds to a model that it trains, or exchanges a part of it: its new layers are watched and converted."""

import copy

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.observe.verdict.high import stays_high


class Body(nn.Module):
    """A body with a part that the test exchanges."""

    def __init__(self):
        super().__init__()
        self.body, self.top = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.top(self.body(x))


def train(model, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def sites(writer, step):
    return {site for at, names, _ in writer.tensors for site in names if at == step}


def operands(*layers):
    return {f"{layer}:{role}" for layer in layers for role in ("input", "weight", "grad_output")}


def rows(facts):
    return {row["name"]: (row["recipe"], tuple(row["shape"])) for row in facts["conversion"]}


def exchanged(tmp_path, other):
    """A session of two steps with a converted top, and two with the other one; its model."""
    with followed(tmp_path, recipe="rowwise", every=1) as (session, writer):
        model = Body()
        train(model, 2)
        model.top = other
        train(model, 2)
    return session, writer, model


def test_a_layer_that_takes_anothers_place_is_converted(tmp_path):
    session, writer, model = exchanged(tmp_path, nn.Linear(32, 64))
    assert isinstance(model.top, Fp8Linear)
    assert {row["name"]: row["calls"] for row in session.facts()["conversion"]} == {"body": 4, "top": 2}
    facts = session.facts()
    assert rows(facts) == {"body": ("rowwise", (32, 32)), "top": ("rowwise", (64, 32))}
    assert facts["conversion_summary"][0]["coverage"] == 1.0
    assert facts["models"] == 1
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert writer.events == [
        (3, "model_changed", "The program added to its model: top was converted to rowwise."),
    ]
    assert "top:weight" in sites(writer, 3)
    numels = [
        columns["numel"][names.index("top:weight")] for _, names, columns in writer.tensors if "top:weight" in names
    ]
    assert numels == [1024, 1024, 2048, 2048]


def test_one_that_cannot_be_converted_counts_against_the_coverage(tmp_path):
    session, writer, model = exchanged(tmp_path, nn.Linear(32, 10))
    facts = session.facts()
    assert rows(facts) == {"body": ("rowwise", (32, 32)), "top": (None, (10, 32))}
    assert facts["conversion_summary"][0]["coverage"] == 1024 / (1024 + 320)
    ((step, kind, what),) = writer.events
    assert (step, kind) == (3, "model_changed")
    assert what.startswith("The program added to its model: top stays high (")
    assert type(model.top) is nn.Linear


def test_what_rules_say_of_layers_that_are_converted_already_is_no_refusal(tmp_path):
    with followed(tmp_path, recipe="current", every=1, convert={"only": ["body", "top"]}) as (session, writer):
        model = Body()
        train(model, 1)
        model.body = nn.Sequential(model.body, nn.Linear(32, 32))
        train(model, 1)
    assert session.roots.conversions.notes == []
    assert isinstance(model.body[1], Fp8Linear)
    assert "body.1 was converted to current" in writer.events[0][2]


def test_what_was_refused_at_first_can_be_converted_later(tmp_path):
    with followed(tmp_path, recipe="current", compiling=True) as (session, _):
        first, second = Body(), nn.Linear(32, 10)
        train(first, 1)
        train(nn.Sequential(second), 1)
        holder = nn.Sequential(second)
        train(holder, 1)
        holder.append(nn.Linear(10, 10))
        holder.append(nn.Linear(10, 32))
        holder.append(nn.Linear(32, 32))
        train(holder, 1)
        assert isinstance(holder[3], Fp8Linear)
    assert session.facts()["refusal"] == ""


def test_nothing_is_told_of_parts_that_are_put_back(tmp_path):
    with followed(tmp_path, recipe="current", every=1) as (_, writer):
        model = Body()
        optimizer = train(model, 1)
        model.top = model.top  # registers it again
        model.extra = nn.Dropout()
        train(model, 1, optimizer)
    assert writer.events == []


def test_it_is_watched_where_nothing_is_converted(tmp_path):
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        model = Body()
        train(model, 1)
        del model.top  # the new one may lie where the old one lay
        model.top = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
        train(model, 2)
    assert sites(writer, 1) == {
        f"{name}:{role}" for name in ("body", "top") for role in ("input", "weight", "grad_output")
    }
    for step in (2, 3):
        wanted = {f"{n}:{role}" for n in ("body", "top.0", "top.1") for role in ("input", "weight", "grad_output")}
        assert sites(writer, step) == wanted
    assert writer.events == [
        (2, "model_changed", "The program added to its model: 'top.0', 'top.1', watched from now on.")
    ]
    assert session.facts()["parameters"] == sum(p.numel() for p in model.parameters())


def test_layers_that_a_compiled_model_gets_are_converted(tmp_path):
    with followed(tmp_path, recipe="current", every=1, compiling=True) as (session, _):
        model = Body()
        compiled = torch.compile(model, backend="eager")
        optimizer = train(compiled, 2)
        model.top = nn.Linear(32, 32)
        optimizer.add_param_group({"params": model.top.parameters()})
        train(compiled, 2, optimizer)
        assert isinstance(model.top, Fp8Linear)
    assert session.facts()["conversion_summary"][0]["coverage"] == 1.0


class Held(nn.Module):
    """Its parts are called, and it itself never is."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(32, 32), nn.Linear(32, 32)

    def loss(self):
        return self.decoder(self.encoder(torch.randn(16, 32))).square().mean()


def test_a_new_part_that_is_called_first_is_a_part_of_the_model(tmp_path):
    with followed(tmp_path, recipe="current", every=1) as (session, writer):
        model = Held()
        for step in range(3):
            if step == 1:
                model.encoder = nn.Linear(32, 32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(model.encoder, Fp8Linear)
    facts = session.facts()
    assert (facts["models"], facts["parameters"]) == (1, 2 * (32 * 32 + 32))
    assert rows(facts) == {"encoder": ("current", (32, 32)), "decoder": ("current", (32, 32))}
    assert [what for _, _, what in writer.events] == [
        "The program added to its model: encoder was converted to current."
    ]


def test_parameters_that_models_share_are_counted_once(tmp_path):
    with followed(tmp_path, judge="current", every=1) as (session, _):
        body = nn.Linear(32, 32)
        first, second = nn.Sequential(body, nn.Linear(32, 16)), nn.Sequential(body, nn.Linear(32, 48))
        train(first, 1)
        train(second, 1)
        first.append(nn.Linear(16, 16))
        train(first, 1)
        second.append(nn.Linear(48, 16))
        train(second, 1)
    assert session.facts()["parameters"] == sum(p.numel() for p in {*first.parameters(), *second.parameters()})


def test_a_frozen_teacher_that_comes_later_is_left_alone(tmp_path):
    with followed(tmp_path, recipe="current", every=1) as (session, _):
        model = Body()
        train(model, 1)
        model.teacher = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
        train(model, 1, torch.optim.SGD([model.body.weight], lr=0.1))
        model.more = nn.Linear(32, 32)
        train(model, 1, torch.optim.SGD([model.body.weight], lr=0.1))
        assert type(model.teacher[0]) is nn.Linear
        assert isinstance(model.more, Fp8Linear)
    assert set(rows(session.facts())) == {"body", "top", "more"}
    assert session.roots.conversions.notes == []


def test_a_lazy_layer_is_converted_when_it_is_made(tmp_path):
    with followed(tmp_path, recipe="current", every=1) as (session, _):
        model = Body()
        train(model, 1)
        model.top = nn.Sequential(nn.LazyLinear(48), nn.LazyLinear(32))
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        train(model, 2, optimizer)
        assert isinstance(model.top[1], Fp8Linear)
        assert not any(known.changed for known in session.roots._models)
    assert {name: recipe for name, (recipe, _) in rows(session.facts()).items()} == dict.fromkeys(
        ("body", "top.0", "top.1"), "current"
    )


def test_a_program_that_makes_a_part_anew_in_every_step_is_followed_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.session.models.roots.MOST_CHANGES", 5)

    class Anew(Body):
        def forward(self, x):
            self.top = nn.Linear(32, 32)
            return super().forward(x)

    with followed(tmp_path, recipe="current", every=1, judge="current", convert={"only": ["body"]}) as (
        session,
        writer,
    ):
        model = Anew()
        train(model, 12, torch.optim.SGD([*model.parameters()], lr=0.1))
        assert len(session.plain._layers) <= 2
    assert len(writer.events) <= 5
    assert (
        session.facts()["notes"].count("The program changed its Anew 5 times: what it adds later is not followed.") == 1
    )


def test_a_rule_that_matches_nothing_any_more_is_told_once(tmp_path):
    class Anew(Body):
        def forward(self, x):
            self.top = nn.Linear(32, 32)
            return super().forward(x)

    with followed(tmp_path, recipe="current", every=1, convert={"skip": ["extra"]}) as (session, _):
        model = Anew()
        model.extra = nn.Linear(32, 32)
        optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
        train(model, 1, optimizer)
        del model.extra
        train(model, 8, optimizer)
    assert len(session.roots.conversions.notes) == 1


class Symmetric(nn.Module):
    def forward(self, w):
        return (w + w.mT) / 2


class Adapted(nn.Module):
    """Adds what a part of it makes, which is trained."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(32, 32))

    def forward(self, w):
        return w + self.parts[0](w)


COMPUTED = {
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


def unexpected(session):
    return [note for note in session.facts()["notes"] if "slower passes" not in note]


@pytest.mark.parametrize("computed", COMPUTED.values(), ids=list(COMPUTED))
def test_a_weight_that_is_computed_from_some_step_on_is_seen(tmp_path, computed):
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        model = Body()
        train(model, 2)
        computed(model.top)
        train(model, 2)
        parametrize.remove_parametrizations(model.top, "weight")
        train(model, 2)
    assert [sites(writer, step) for step in range(1, 7)] == [operands("body", "top")] * 6
    assert (session.facts()["models"], unexpected(session), writer.events) == (1, [], [])


def test_so_is_that_of_a_convolution(tmp_path):
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        model = nn.Sequential(nn.Unflatten(0, (1, 16)), nn.Conv1d(16, 32, 1))
        train(model, 2)
        parametrizations.weight_norm(model[1])
        train(model, 2)
    assert [sites(writer, step) for step in range(1, 5)] == [operands("1")] * 4
    assert unexpected(session) == []


@pytest.mark.parametrize("plan", [{}, {"recipe": "current"}], ids=["as it is", "converted"])
@pytest.mark.parametrize("before", [0, 2])
def test_what_computes_a_weight_is_no_model(tmp_path, before, plan):
    with followed(tmp_path, judge="current", every=1, **plan) as (session, writer):
        model, adapted = Body(), Adapted()
        optimizer = torch.optim.SGD([*model.parameters(), *adapted.parameters()], lr=0.1)
        train(model, before, optimizer)
        parametrize.register_parametrization(model.top, "weight", adapted)
        for _ in range(2):
            (model(torch.randn(16, 32)).square().mean() + model.top.weight.square().mean()).backward()
            model.top.weight.square().mean()
            optimizer.step()
            optimizer.zero_grad()
    assert operands("body", "top") <= sites(writer, before + 2)
    assert set(writer.column("tokens").values()) == {16}
    assert (session.facts()["models"], unexpected(session)) == (1, [])


def test_what_was_added_or_is_gone(tmp_path):
    with followed(tmp_path, recipe="current", every=1, judge="current", convert={"skip": ["top"]}) as (session, _):
        model = Body()
        model.extra = nn.Linear(32, 32)
        train(model, 1)
        del model.extra
        model.top = nn.Sequential(nn.Linear(32, 32))
        model.body = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        train(model, 1)
    facts = session.facts()
    assert {row["name"]: (row["recipe"], row.get("added")) for row in facts["conversion"]} == {
        "top.0": (None, True),
        "body.0": ("current", True),
        "body.1": ("current", True),
    }
    high = stays_high({0: {"recipe": "current", **facts}})
    assert [high(site) for site in ("top.0:input", "top:input", "body.0:input")] == [True, True, False]


class Around(nn.Module):
    """A layer that an adapter was put around."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base, nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_a_layer_that_is_moved_keeps_its_row_under_the_name_of_its_sites(tmp_path):
    with followed(tmp_path, recipe="current", every=1) as (session, writer):
        model = Body()
        train(model, 1)
        model.body = Around(model.body)  # as an adapter comes around a layer
        train(model, 1)
    high = {"body.lora_A": None, "body.lora_B": None}
    assert {row["name"]: row["calls"] for row in session.facts()["conversion"]} == {"body": 2, "top": 2, **high}
    assert session.facts()["conversion_summary"][0]["coverage"] == 2048 / (2048 + 256)
    assert operands("body", "top") <= sites(writer, 2)
    assert "linear_gone" not in session.facts()


def test_so_does_one_whose_adapter_was_merged_and_is_gone(tmp_path):
    with followed(tmp_path, recipe="current", every=1, judge="current") as (session, writer):
        model = Body()
        model.body, model.top = Around(model.body), nn.Sequential(nn.Linear(32, 10))
        train(model, 1)
        model.body, model.top = model.body.base_layer, model.top[0]
        train(model, 1)
    facts = session.facts()
    assert rows(facts) == {"body.base_layer": ("current", (32, 32)), "top": (None, (10, 32))}
    assert [row["calls"] for row in facts["conversion"]] == [2, None]
    assert operands("body.base_layer") <= sites(writer, 2)
    # These were linear layers, and no product that a conversion knows nothing of.
    assert facts["linear_gone"] == ["body.lora_A", "body.lora_B", "top.0"]


def test_a_copy_that_takes_its_layers_place_has_its_row(tmp_path):
    with followed(tmp_path, recipe="current", every=1) as (session, _):
        model = Body()
        train(model, 1)
        model.body, model.extra = copy.deepcopy(model.body), nn.Linear(32, 32)
        train(model, 1)
    assert [row["name"] for row in session.facts()["conversion"]] == ["body", "top", "extra"]


def test_a_name_that_is_an_fp8_layers_by_now_is_not_high():
    converted = [{"name": "1", "recipe": "current"}, {"name": "up.lora", "recipe": "current"}]
    high = stays_high({0: {"recipe": "current", "judged": ["1", "up"], "conversion": converted}})
    assert [high(site) for site in ("1:input", "up:input", "up.lora:input")] == [False, True, False]
