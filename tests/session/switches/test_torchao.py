"""`[[high]]` on torchao's layers: what stays high is the plain product, bit by bit, and the rest is what it was."""

from types import SimpleNamespace

import pytest
import torch
from tests.session.inline import followed
from torch import nn

from narrowgauge.errors import ConversionError
from narrowgauge.session.switches import foreign

pytest.importorskip("torchao.float8")
pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def switch(model, tables, *, converting):
    return foreign.switch(model, tables, model, converting=converting).told


def model(recipe="tensorwise"):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    config = Float8LinearConfig(**{**vars(Float8LinearConfig.from_recipe_name(recipe)), "emulate": True})
    plain = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 48), nn.Linear(48, 16))
    return convert_to_float8_training(plain, config=config, module_filter_fn=lambda module, name: name != "2")


def multiplied(layer):
    """Its three products of the same tensors, and these."""
    torch.manual_seed(1)
    x = torch.randn(64, layer.in_features, requires_grad=True)
    dy = torch.randn(64, layer.out_features)
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    w = layer.weight.detach()
    found = {"fprop": y.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad}
    return found, {"fprop": x.detach() @ w.t(), "dgrad": dy @ w, "wgrad": dy.t() @ x.detach()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemms", [("fprop",), ("dgrad",), ("wgrad",), ("fprop", "dgrad", "wgrad")], ids="-".join)
def test_a_product_that_stays_high_is_the_plain_one_and_the_others_are_what_they_were(recipe, gemms):
    switched, as_it_was = model(recipe), model(recipe)
    told = switch(switched, [{"sites": ["0"], "gemms": list(gemms)}], converting=False)
    assert told == {"0": ", ".join(f"{gemm} high" for gemm in gemms)}
    found, plain = multiplied(switched[0])
    before, _ = multiplied(as_it_was[0])
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert torch.equal(found[gemm], plain[gemm] if gemm in gemms else before[gemm]), gemm
    if gemms == ("fprop",):
        assert not torch.equal(before["fprop"], plain["fprop"])
    others, _ = multiplied(switched[1])
    assert all(torch.equal(others[gemm], want) for gemm, want in multiplied(as_it_was[1])[0].items())


def test_layers_that_shared_a_configuration_share_the_new_one_and_tables_add_up():
    net = model()
    untouched = net[0].config
    tables = [{"gemms": ["wgrad"]}, {"sites": ["*", "!0"], "gemms": ["dgrad"]}]
    assert switch(net, tables, converting=True) == {"0": "wgrad high", "1": "dgrad high, wgrad high"}
    again = model()
    switch(again, [{"gemms": ["wgrad"]}], converting=True)
    assert again[0].config is again[1].config
    assert model()[0].config == untouched
    assert net[0].scaling_type_input.value == "dynamic"
    switch(net, [{"sites": ["0"], "gemms": ["fprop"]}], converting=True)
    assert (net[0].scaling_type_input.value, net[0].scaling_type_grad_output.value) == ("disabled", "dynamic")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"roles": ["grad_output"]}, r"roles=\['grad_output'\] names '0', a Float8Linear .* leave roles out"),
        ({"keep": "bf16_gemm"}, r"keep='bf16_gemm' names '0', .* leave keep out, or the layer \('!0'\)"),
        ({"sites": ["body"]}, "high 'body' matches no module of the model; its linear layers: '0', '1', '2'"),
    ],
)
def test_what_torchao_cannot_do_is_refused_and_nothing_is_changed(table, words):
    net = model()
    before = [layer.config for layer in list(net)[:2]]
    with pytest.raises(ConversionError, match=words):
        switch(net, [table], converting=False)
    assert [layer.config for layer in list(net)[:2]] == before


def test_a_weight_that_fsdp_gathers_in_fp8_has_only_its_gradient_s_product_to_switch():
    from dataclasses import replace

    net = model()
    for layer in list(net)[:2]:
        layer.config = replace(layer.config, enable_fsdp_float8_all_gather=True)
    with pytest.raises(ConversionError, match="whose weight FSDP gathers in FP8, so only its wgrad can stay high"):
        switch(net, [{"gemms": ["dgrad"]}], converting=False)
    assert switch(net, [{"gemms": ["wgrad"]}], converting=False) == {"0": "wgrad high", "1": "wgrad high"}


def test_another_version_s_configuration_is_refused_in_words():
    net = model()
    net[1].config = SimpleNamespace(cast_config_input=None)
    with pytest.raises(ConversionError, match=r"does not let '1' multiply fprop in high precision \(AttributeError: "):
        switch(net, [{"gemms": ["fprop"]}], converting=False)
    assert net[0].config == model()[0].config


def train(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()


def test_a_watched_program_s_layers_are_switched_before_they_first_run(tmp_path):
    high = [{"sites": ["0"], "gemms": ["fprop"], "roles": [], "keep": "high"}]
    with followed(tmp_path, every=1, judge="current", compiling=True, convert={"high": high}) as (session, writer):
        net = model()
        train(net)
    facts = session.facts()
    assert facts["switched"] == {"0": "fprop high"}
    assert facts["unmet"] == []
    sites = {site for _, names, _ in writer.tensors for site in names}
    assert {"0:input", "0:weight", "0:grad_output"} <= sites  # of the products in which they are cast
    assert not any("high precision" in note for note in facts["notes"])


def test_tables_that_no_layer_takes_are_told(tmp_path):
    high = [{"sites": ["*"], "gemms": ["wgrad"], "roles": [], "keep": "high"}]
    with followed(tmp_path, every=1, judge="current", compiling=True, convert={"high": high}) as (session, _):
        train(nn.Sequential(nn.Linear(32, 16)))
    assert session.facts()["unmet"] == [
        "high matched nothing in this program; it is for layers that --convert or the program takes to FP8, torchao's "
        "and TransformerEngine's."
    ]


def test_a_table_whose_layers_are_plain_is_told_beside_one_that_is_taken(tmp_path):
    high = [{"sites": [name], "gemms": ["wgrad"], "roles": [], "keep": "high"} for name in ("2", "1")]
    with followed(tmp_path, every=1, judge="current", compiling=True, convert={"high": high}) as (session, _):
        train(model())
    assert session.facts()["switched"] == {"1": "wgrad high"}
    assert session.facts()["unmet"] == [
        "high[0]: none of the layers that it names is in FP8, so there was nothing to switch."
    ]


def test_a_comparison_s_baseline_is_as_it_is_written(tmp_path):
    high = [{"sites": ["*"], "gemms": ["wgrad"], "roles": [], "keep": "high"}]
    with followed(tmp_path, every=1, judge="current", convert={"high": high}) as (session, _):
        net = model()
        train(net)
    assert "switched" not in session.facts()
    assert net[0].config == model()[0].config


def test_an_operand_of_which_only_the_second_product_is_cast_by_column_is_told():
    from narrowgauge.session.sites.torchao import _rule

    net = model("rowwise")
    switch(net, [{"sites": ["0"], "gemms": ["fprop"]}], converting=False)
    assert "only for its second product, by column" in _rule(net[0].config, "input", torch.ones(2, 32))
    everything = model()
    switch(everything, [{}], converting=False)
    assert "in high precision" in _rule(everything[0].config, "weight", torch.ones(2, 32))
