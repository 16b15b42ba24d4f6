"""Which layers the rules take: roles, routers, heads, blocks, ties, and patterns that match nothing."""

import pytest
import torch
from torch import nn

from narrowgauge.compute.nn.conversion.rule_checks import check_patterns, check_rules
from narrowgauge.compute.nn.conversion.rules import O1, O2, Rule, decide, is_router
from narrowgauge.compute.nn.conversion.structure import Layer, stacks, survey
from narrowgauge.errors import ConversionError


class Mlp(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.down_proj = nn.Linear(2 * dim, dim)


class Attention(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)


class Moe(nn.Module):
    def __init__(self, dim=32, experts=16):
        super().__init__()
        self.switch = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(Mlp(dim) for _ in range(experts))


class Block(nn.Module):
    def __init__(self, dim=32, feed_forward=Mlp):
        super().__init__()
        self.attn, self.mlp = Attention(dim), feed_forward(dim)


class Gpt(nn.Module):
    def __init__(self, dim=32, depth=4, vocab=64, feed_forward=Mlp):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.patch_embed = nn.Linear(48, dim)
        self.layers = nn.ModuleList(Block(dim, feed_forward) for _ in range(depth))
        self.to_vocab = nn.Linear(dim, vocab, bias=False)


def chosen(model, rules=O2):
    """name -> reason for what converts, and for what stays high."""
    low, high = {}, {}
    for layer in survey(model):
        rule, reason = decide(layer, rules)
        (high if rule is None or rule.high else low)[layer.name] = reason
    return low, high


def layer(name, n=64, k=64, **facts):
    return Layer(name, nn.Linear(k, n), (n, k), **facts)


def test_o2_converts_everything_but_head_and_input_embedding():
    low, high = chosen(Gpt())
    assert len(low) == 20
    assert set(high) == {"patch_embed", "to_vocab"}
    assert high["to_vocab"] == "output head: as many outputs as an embedding has rows (64)"
    assert high["patch_embed"].startswith("embedding")


def test_o1_takes_known_roles_and_blocks_and_nothing_else():
    model = Gpt()
    model.adapter = nn.Linear(32, 32)
    model.extra = nn.ModuleDict({"w1": nn.Linear(32, 32)})
    low, high = chosen(model, O1)
    assert low["layers.0.attn.q_proj"] == low["extra.w1"] == "O1: attention or feed-forward matmul"
    assert high["adapter"] == "not on O1's white list"
    model.layers[1].mystery = nn.Linear(32, 32)
    assert chosen(model, O1)[0]["layers.1.mystery"] == "O1: linear of a repeated block"


@pytest.mark.parametrize(
    "name",
    ["lm_head", "head", "model.head.fc", "output", "score", "classifier", "classifier.1", "embed_out"],
)
def test_a_head_is_known_by_its_name(name):
    model = nn.Module()
    *path, last = name.split(".")
    at = model
    for part in path:
        at.add_module(part, nn.Module())
        at = at.get_submodule(part)
    at.add_module(last, nn.Linear(32, 32))
    assert "output head" in chosen(model)[1][name]


def test_output_inside_a_block_is_no_head():
    model = Gpt()
    model.layers[0].attn.output = nn.Linear(32, 32)
    assert "layers.0.attn.output" in chosen(model)[0]


def test_only_the_last_layer_with_as_many_outputs_as_the_embedding_is_the_head():
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    low, high = chosen(model)
    assert (list(low), list(high)) == (["1"], ["3"])


def test_a_head_inside_a_block_sized_like_the_vocabulary_converts():
    low, _ = chosen(Gpt(dim=64, vocab=64))
    assert "layers.3.attn.o_proj" in low


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (layer("layers.0.moe.router", 128, 128), "its name says so"),
        (layer("layers.0.moe.router.classifier", 128, 128), "its name says so"),
        (layer("layers.0.moe.gate", 8, 64), "a gate with few outputs (8 of 64 inputs)"),
        (layer("layers.0.moe.shared_expert_gate", 1, 64), "few outputs"),
        (layer("layers.0.moe.wg", 16, 32, experts=16), "one output for each of the 16 experts beside it"),
    ],
)
def test_routers_are_found(candidate, why):
    assert why in is_router(candidate)


@pytest.mark.parametrize(
    "candidate",
    [
        layer("layers.0.mlp.gate_proj", 176, 64),
        layer("layers.0.mlp.gate", 176, 64),
        layer("layers.0.moe.experts.3.gate", 48, 128),  # fine-grained experts are narrower than the model
        layer("layers.0.mlp.up_gate_proj", 8, 64),
    ],
)
def test_a_swiglu_gate_is_no_router(candidate):
    assert not is_router(candidate)


def test_a_router_is_known_by_the_experts_beside_it():
    low, high = chosen(Gpt(feed_forward=Moe))
    assert high["layers.2.mlp.switch"] == "router: one output for each of the 16 experts beside it"
    assert "layers.2.mlp.experts.5.gate_proj" in low


def test_adapters_and_norm_projections_stay_high():
    model = Gpt()
    model.layers[0].lora_A = nn.Linear(32, 16)
    model.layers[0].norm1 = nn.Module()
    model.layers[0].norm1.linear = nn.Linear(32, 64)
    _, high = chosen(model)
    assert "adapter" in high["layers.0.lora_A"]
    assert high["layers.0.norm1.linear"] == "part of a norm"


def test_blocks_are_the_outermost_stack_not_the_longer_list_of_experts():
    model = Gpt(depth=3, feed_forward=Moe)
    assert [len(stack) for stack in stacks(model)] == [3]
    assert {x.block for x in survey(model) if "experts" in x.name} == {0, 1, 2}


def test_blocks_of_nested_models_and_of_stages_are_counted_in_order():
    model = nn.Module()
    model.encoder, model.decoder = Gpt(depth=2), Gpt(depth=3)
    layers = {x.name: x for x in survey(model)}
    assert layers["encoder.layers.1.mlp.up_proj"].block == 1
    assert layers["decoder.layers.2.mlp.up_proj"].block == 4
    assert layers["encoder.to_vocab"].block is None
    stages = nn.Sequential(*(nn.Sequential(*(Block() for _ in range(2))) for _ in range(3)))
    assert {x.block for x in survey(stages)} == set(range(6))


def test_blocks_between_other_children_of_a_sequential_are_found():
    model = nn.Sequential(nn.Embedding(64, 32), *(Block() for _ in range(3)), nn.Linear(32, 64))
    assert [x.block for x in survey(model)] == [i for i in range(3) for _ in range(5)] + [None]
    assert stacks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == []
    assert len(stacks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))[0]) == 2


def test_a_small_accessory_list_is_not_the_depth_of_the_model():
    model = Gpt()
    model.aux = nn.ModuleList(nn.Linear(16, 16) for _ in range(9))
    assert {x.blocks for x in survey(model)} == {4}


def test_ties_are_seen_by_identity_and_by_memory():
    model = Gpt()
    model.to_vocab.weight = model.embed.weight
    model.patch_embed = nn.Linear(32, 32)
    model.layers[0].attn.q_proj.weight = model.layers[1].attn.q_proj.weight
    layers = {x.name: x for x in survey(model)}
    assert layers["to_vocab"].tied == ("embed",)
    assert layers["layers.0.attn.q_proj"].shared_with == ("layers.1.attn.q_proj",)
    assert layers["layers.0.attn.q_proj"].tied == ()
    other = Gpt()
    other.to_vocab.weight.data = other.embed.weight.data
    assert {x.name: x.tied for x in survey(other)}["to_vocab"] == ("embed",)


def test_one_module_under_two_names_is_one_layer():
    model = Gpt()
    model.layers[3].attn = model.layers[0].attn
    layers = {x.name: x for x in survey(model)}
    assert layers["layers.0.attn.q_proj"].aliases == ("layers.3.attn.q_proj",)
    assert "layers.3.attn.q_proj" not in layers


def test_wrappers_leave_no_trace_in_names():
    inner = Gpt()
    assert survey(torch.compile(inner, backend="eager"))[1].name == "layers.0.attn.q_proj"
    assert survey(nn.DataParallel(inner))[1].name == "layers.0.attn.q_proj"
    assert survey(nn.Linear(16, 16))[0].name == "(model)"


def test_a_pattern_covers_what_lies_below_it_and_first_match_wins():
    rules = (Rule.to("layers.1.mlp.up_proj"), Rule.keep("layers.1", "sick block"), *O2)
    low, high = chosen(Gpt(), rules)
    assert low["layers.1.mlp.up_proj"] == "rule 'layers.1.mlp.up_proj'"
    assert high["layers.1.attn.q_proj"] == "sick block"
    assert "layers.2.attn.q_proj" in low
    assert "layers.1.attn.q_proj" not in chosen(Gpt(), (Rule.keep("layers.[01].*"), *O2))[0]


def test_a_layer_that_no_rule_takes_stays_high():
    low, high = chosen(Gpt(), (Rule.to("*.down_proj"),))
    assert len(low) == 4
    assert high["layers.0.attn.q_proj"] == "no rule matches it"


def test_where_narrows_a_rule_and_may_give_the_reason():
    wide = Rule.keep("*", where=lambda x: f"{x.shape[1]} inputs" if x.shape[1] > 32 else False)
    _, high = chosen(Gpt(), (wide, *O2))
    assert high["layers.0.mlp.down_proj"] == "64 inputs"


def check(rules=O2, skip=(), only=(), model=None):
    model = model or Gpt()
    layers, names = survey(model), [name for name, _ in model.named_modules()]
    check_rules(rules, layers, names)
    check_patterns("skip", skip, layers, names)
    check_patterns("only", only, layers, names)


def test_patterns_that_match_nothing_name_the_nearest_module():
    with pytest.raises(ConversionError, match=r"^skip 'lm_head' matches no module of the model; its linear"):
        check(skip=["lm_head"])
    with pytest.raises(ConversionError, match=r"^skip 'to_vocb' .*; did you mean 'to_vocab'\?$"):
        check(skip=["to_vocb"])
    with pytest.raises(ConversionError, match=r"^only '\*\.dwn_proj' .*; did you mean 'layers.\d.mlp.down_proj'\?$"):
        check(only=["*.dwn_proj"])
    with pytest.raises(ConversionError, match=r"^rule 'blocks.3.attn' .* did you mean 'layers.3.attn'\?$"):
        check((Rule.keep("blocks.3.attn"), *O2))
    with pytest.raises(ConversionError, match=r"^only 'embed' matches 'embed', which hold no linear layer"):
        check(only=["embed"])
    check(skip=["embed"])  # an embedding does stay high


def test_a_rule_that_is_never_reached_is_an_error():
    with pytest.raises(ConversionError, match=r"rule 'layers\.1' is never reached: .*taken by a rule before it"):
        check((*O2, Rule.keep("layers.1")))
