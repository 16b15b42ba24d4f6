"""`[[high]]` on layers that the program has converted by `ng.convert`: as `convert(high=...)` would have kept them."""

import pytest
import torch
from tests.session.inline import followed
from torch import nn

import narrowgauge as ng
from narrowgauge.session.switches import foreign

TABLES = {
    "a product": {"sites": ["2"], "gemms": ["wgrad"]},
    "an operand": {"roles": ["weight"]},
    "a gemm": {"sites": ["*", "!0"], "keep": "bf16_gemm"},
}
ASKED = {"sites": ["*"], "gemms": ["fprop", "dgrad", "wgrad"], "roles": [], "keep": "high"}


def model(recipe="current", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 16))
    return ng.convert(net, recipe, **options)[0] if recipe else net


def train(net, steps=3, called=None):
    """Losses, and weights in the end."""
    called = net if called is None else called
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = called(torch.randn(64, 32)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in net.parameters()]


def same(found, wanted):
    return found[0] == wanted[0] and all(map(torch.equal, found[1], wanted[1]))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_it_trains_as_if_the_program_had_asked_for_it_and_is_told(tmp_path, recipe, table):
    asked = TABLES[table]
    high = [ASKED | asked]
    with followed(tmp_path, every=1, judge="current", compiling=True, convert={"high": high}) as (session, writer):
        found = train(model(recipe))
    assert same(found, train(model(recipe, high=[asked])))
    if (recipe, table) != ("blockwise", "a gemm"):  # emulated, blocks are multiplied so anyway
        assert not same(found, train(model(recipe)))
    facts = session.facts()
    assert facts["unmet"] == []
    assert facts["switched"].keys() == {"a product": {"2"}, "an operand": {"0", "2", "4"}, "a gemm": {"2", "4"}}[table]
    if table == "a product":
        assert facts["switched"] == {"2": "wgrad high"}
    sites = {site for _, names, _ in writer.tensors for site in names}
    assert "2:input" in sites


def test_a_layer_that_is_high_whole_is_the_plain_one_and_named(tmp_path):
    high = [ASKED]
    with followed(tmp_path, every=1, judge="current", compiling=True, convert={"high": high}) as (session, _):
        found = train(model())
    assert same(found, train(model(recipe=None)))
    assert session.facts()["switched"] == dict.fromkeys("024", "fprop high, dgrad high, wgrad high")


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_as_it_was_when_the_watch_has_ended(tmp_path, compiled):
    net, other = model("delayed"), model("delayed")
    called = [torch.compile(each, backend="aot_eager", fullgraph=True) if compiled else each for each in (net, other)]
    before = [train(each, 2, call) for each, call in zip((net, other), called, strict=True)]
    high = [ASKED | {"sites": ["0"]}]
    with followed(tmp_path, every=2, judge="current", compiling=True, convert={"high": high}):
        switched = train(net, 2, called[0])
    assert same(*before)
    assert not same(switched, train(other, 2, called[1]))
    assert not net[0]._fp8.keeps_high
    assert net[0]._fp8.recipe == other[0]._fp8.recipe
    with torch.no_grad():
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    net[0]._fp8.table.scale.copy_(other[0]._fp8.table.scale)
    for name in ("history", "inv_scale", "amax_now"):
        getattr(net[0]._fp8.table, name).copy_(getattr(other[0]._fp8.table, name))
    assert same(train(net, 2, called[0]), train(other, 2, called[1]))


def test_what_is_converted_by_the_command_has_its_switches_once(tmp_path):
    net = model()
    kept = foreign.switch(net, [ASKED | {"gemms": ["wgrad"]}], net, converting=True)
    assert kept.told == {}
    assert not net[0]._fp8.keeps_high


def test_a_layer_of_two_models_is_as_it_was_as_well(tmp_path):
    net = model()
    other = nn.Sequential(nn.Linear(32, 32), net[0], nn.Linear(48, 16))
    high = [ASKED | {"gemms": ["wgrad"]}]
    recipe = net[0]._fp8.recipe
    with followed(tmp_path, every=1, judge="current", compiling=True, convert={"high": high}) as (session, _):
        train(net)
        train(other)
        assert net[0]._fp8.recipe.wgrad.high == "ab"
    assert session.facts()["models"] == 2
    assert net[0]._fp8.recipe == recipe
