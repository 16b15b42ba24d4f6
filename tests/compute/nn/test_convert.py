"""convert and revert: what changes, what must not, and what is refused with which words."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from narrowgauge.compute import recipes
from narrowgauge.compute.nn import Fp8Linear, convert, revert
from narrowgauge.compute.nn.conversion.rules import O1, O2, Rule
from narrowgauge.errors import ConversionError, RecipeError


def names(model):
    return [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]


def reasons(report):
    return {row.name: row.reason for row in report.rows if row.recipe is None}


def state_bytes(model):
    return {key: (value.dtype, value.clone()) for key, value in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[k][0] == right[k][0] and torch.equal(left[k][1], right[k][1]) for k in left
    )


def test_it_converts_in_place_and_touches_nothing_else(gpt):
    model = gpt()
    handle = model.blocks[0].up.register_forward_hook(lambda *_: None)
    model.blocks[1].up.extra = "mine"
    model.blocks[2].eval()
    alias = model.blocks[0].up
    before, parameters = state_bytes(model), list(model.parameters())
    random = torch.get_rng_state()
    same_model, report = convert(model, "current")
    assert same_model is model
    assert torch.equal(random, torch.get_rng_state())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert same(before, state_bytes(model))
    assert alias is model.blocks[0].up
    assert isinstance(alias, Fp8Linear)
    assert handle.id in alias._forward_hooks
    assert model.blocks[1].up.extra == "mine"
    assert not model.blocks[2].up.training
    assert model.blocks[0].up.training
    assert names(model) == [f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("up", "down")]
    assert report.coverage == 12 / (12 + 48 / 32)
    assert "output head" in reasons(report)["lm_head"]


def test_revert_undoes_it_bit_for_bit(gpt):
    model, plain = gpt(), gpt()
    attributes = {name: sorted(m.__dict__) for name, m in model.named_modules()}
    tokens = torch.arange(24).reshape(2, 12)
    convert(model, "delayed")
    assert not torch.equal(model(tokens), plain(tokens))
    model(tokens).sum().backward()
    assert revert(model) is model
    assert {name: sorted(m.__dict__) for name, m in model.named_modules()} == attributes
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert same(state_bytes(model), state_bytes(plain))
    assert getattr(model.state_dict(), "_metadata", None) == getattr(plain.state_dict(), "_metadata", None)
    assert torch.equal(model(tokens), plain(tokens))
    convert(model, "current")
    assert not torch.equal(model(tokens), plain(tokens))


def test_an_optimizer_made_before_or_after_works(gpt, run_steps):
    early, late = gpt(), gpt()
    optimizer = torch.optim.AdamW(early.parameters(), lr=1e-2)
    convert(early, "delayed")
    convert(late, "delayed")
    losses = run_steps(early, optimizer, 5)
    assert losses == run_steps(late, torch.optim.AdamW(late.parameters(), lr=1e-2), 5)
    assert losses[-1] < losses[0]


def test_skip_first_last_only_and_rules(gpt):
    def converted(**how):
        model, report = convert(gpt(depth=4), "current", **how)
        return names(model), reasons(report)

    kept, why = converted(skip=["*.down"])
    assert all(name.endswith("up") for name in kept)
    assert why["blocks.0.down"] == "skip='*.down'"
    assert converted(skip="blocks.2")[0] == converted(skip=("blocks.2.*",))[0]
    kept, why = converted(first=1, last=2)
    assert kept == ["blocks.1.up", "blocks.1.down"]
    assert why["blocks.0.up"] == "first=1: block 0 of 4 stays high"
    assert why["blocks.3.up"] == "last=2: block 3 of 4 stays high"
    kept, why = converted(only=["blocks.[01].up"])
    assert kept == ["blocks.0.up", "blocks.1.up"]
    assert why["blocks.1.down"] == "not in only="
    assert converted(rules=(Rule.to("lm_head"), *O2))[0][-1] == "lm_head"
    assert converted(rules=O1)[0] == converted()[0]
    model, report = convert(gpt(), "current", rules=(Rule.to("*.down", recipes.ROWWISE), *O2))
    assert {row.recipe for row in report.rows} == {"current", "rowwise", None}
    assert model.blocks[0].down._fp8.recipe is recipes.ROWWISE
    assert [b[0] for b in report.backends] == ["current", "rowwise"]


def test_a_tied_head_converts_only_when_named_outright(gpt):
    def tied():
        model = gpt(vocab=32)
        model.blocks[0].inner = nn.Linear(32, 32, bias=False)
        model.blocks[0].inner.weight = model.embed.weight
        return model

    assert reasons(convert(tied(), "current")[1])["blocks.0.inner"] == "its weight is tied to embed"
    assert "blocks.0.inner" not in names(convert(tied(), "current", rules=[Rule.to("*")])[0])
    assert "blocks.0.inner" in names(convert(tied(), "current", rules=(Rule.to("blocks.0.inner"), *O2))[0])


def test_linears_that_share_a_weight_convert_and_say_so(gpt):
    model = gpt()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    _, report = convert(model, "current")
    assert {row.name: row.shared_with for row in report.rows}["blocks.0.up"] == ("blocks.1.up",)
    assert "blocks.1.up" in names(model)


class Adapter(nn.Linear):
    """A subclass with a behaviour of its own."""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda m: setattr(m, "up", Adapter(32, 64)),
            "Adapter is a subclass of nn.Linear with a behaviour of its own",
        ),
        (lambda m: parametrizations.weight_norm(m.up), "its weight is parametrized"),
        (
            lambda m: parametrize.register_parametrization(m.up, "bias", nn.Identity()),
            "its bias is parametrized",
        ),
        (lambda m: nn.utils.spectral_norm(m.up), "its weight is computed"),
        (lambda m: setattr(m.up, "forward", lambda x: x), "its forward was replaced on the instance"),
        (lambda m: m.up.double(), "its weight is float64; float32, bfloat16 or float16 can be quantized"),
        (lambda m: m.up.to(torch.complex64), "its weight is complex64"),
        (lambda m: m.up.to("meta"), "its weight is on the meta device: materialize"),
        (lambda m: setattr(m, "up", nn.LazyLinear(64)), "LazyLinear has no weight yet: run the model once"),
        (lambda m: setattr(m, "up", nn.Linear(30, 64)), "K=30 is not a multiple of 16"),
        (lambda m: setattr(m, "up", nn.Linear(32, 40)), "N=40 is not a multiple of 16"),
        (lambda m: setattr(m, "up", nn.Linear(32, 0)), "its weight is empty"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element", "ignore:Complex modules")
def test_what_cannot_convert_stays_high_with_the_reason(gpt, change, why):
    model = gpt()
    change(model.blocks[0])
    _, report = convert(model, "current")
    assert "blocks.0.up" not in names(model)
    assert why in reasons(report)["blocks.0.up"]
    assert "blocks.1.up" in names(model)


def test_integer_weights_stay_high(gpt):
    model = gpt()
    weight = nn.Parameter(torch.ones(64, 32, dtype=torch.int8), requires_grad=False)
    model.blocks[0].up.weight = weight
    assert "its weight is int8" in reasons(convert(model, "current")[1])["blocks.0.up"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_is_left_alone(gpt):
    model = gpt()
    model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(32, 32)))
    _, report = convert(model, "current")
    assert [row.name for row in report.converted] == ["blocks.0.up", "blocks.0.down", "blocks.2.up", "blocks.2.down"]
    model(torch.arange(8)[None]).sum().backward()


def test_attention_and_gpt2_layers_count_as_linear_layers_that_stayed_high():
    class Conv1D(nn.Module):
        def __init__(self, outputs, inputs):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(inputs, outputs))

    model = nn.Module()
    model.attention, model.conv, model.fc = nn.MultiheadAttention(32, 2), Conv1D(96, 32), nn.Linear(32, 32)
    _, report = convert(model, "current")
    assert "reads its weight without calling it" in reasons(report)["attention.out_proj"]
    assert "in_proj_weight" in reasons(report)["attention"]
    assert reasons(report)["conv"] == "Conv1D is no nn.Linear"
    assert {row.name: row.shape for row in report.rows} == {
        "attention": (96, 32), "attention.out_proj": (32, 32), "conv": (96, 32), "fc": (32, 32)
    }  # fmt: skip
    assert report.coverage == pytest.approx(1 / 8)


def test_a_layer_converted_and_never_called_is_in_the_report(gpt):
    model = gpt()
    model.unused = nn.Linear(32, 32)
    _, report = convert(model, "current")
    assert len(report.never_called()) == 7
    model(torch.arange(8)[None])
    assert report.never_called() == ("unused",)
    assert "converted and never called: unused" in str(report)


def test_a_root_linear_converts():
    layer = nn.Linear(32, 32)
    _, report = convert(layer, "current")
    assert type(layer) is Fp8Linear
    assert report.rows[0].name == "(model)"
    assert type(revert(layer)) is nn.Linear


def test_fused_encoder_layers_are_noted():
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    _, report = convert(model, "current")
    assert "fused path" in report.notes[0]
    assert report.notes[0] in str(report)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"skip": ["lm_haed"]}, r"skip 'lm_haed' matches no module of the model; did you mean 'lm_head'\?"),
        (
            {"only": ["blocks.9"]},
            r"only 'blocks.9' matches no module of the model; did you mean 'blocks.\d'\?",
        ),
        (
            {"only": ["module.*"]},
            r"'module\.\*' matches no module of the model; names are without the `module\.` that a wrapper \(DDP\) "
            r"puts in front; its linear layers: 'blocks\.0\.",
        ),
        ({"only": ["module.lm_head"]}, r"`module\.` that a wrapper \(DDP\) puts in front; did you mean 'lm_head'\?"),
        ({"only": ["model"]}, r"only 'model' matches no module of the model; its linear layers: "),
        (
            {"rules": (Rule.keep("block.0"), *O2)},
            r"rule 'block.0' matches no module of the model; did you mean",
        ),
        ({"rules": (*O2, Rule.keep("blocks.0"))}, r"rule 'blocks.0' is never reached"),
        ({"first": 2, "last": 1}, r"first=2 and last=1 keep all 3 blocks high; keep fewer"),
        ({"first": -1}, r"first=-1, last=0: both count blocks that stay high, so 0 or more"),
        (
            {"only": ["lm_head"]},
            r"none of the 7 .* of Gpt can be converted .* keys of \[convert\] .* What a rule keeps .*Rule.to\(NAME\)",
        ),
        (
            {"skip": ["blocks"]},
            r"can be converted .* keys of \[convert\] in a settings file \(--config\)\. What a rule",
        ),
        ({"skip": ["*"]}, r"can be converted .* keys of \[convert\] in a settings file \(--config\)\.$"),
        (
            {"rules": (Rule.keep("*"),)},
            r"can be converted [^[]*\. What a rule keeps .*: no file of settings has rules\.$",
        ),
    ],
)
def test_refusals_say_what_was_found_and_leave_the_model_alone(gpt, how, message):
    model = gpt()
    with pytest.raises(ConversionError, match=message):
        convert(model, "current", **how)
    assert names(model) == []


def test_what_is_no_argument_of_its_kind_is_said(gpt):
    with pytest.raises(ConversionError, match=r"convert got a type as the model; expected a torch\.nn\.Module\."):
        convert(nn.Linear, "current")
    with pytest.raises(ConversionError, match=r"high is a dict; expected a list of mappings: high=\[\{\.\.\.\}\]\."):
        convert(gpt(), "current", high={"gemms": ["wgrad"]})
    with pytest.raises(RecipeError, match=r"recipes' from .* is no recipe; expected one of narrowgauge\.recipes"):
        convert(gpt(), recipes)


def test_no_rule_is_advised_where_none_would_help():
    with pytest.raises(ConversionError, match=r"K=20 is not a multiple of 16, which FP8 gemms need\)\.$"):
        convert(nn.Sequential(nn.Linear(20, 32), nn.ReLU()), "current")


def test_refusals_for_models_without_anything_to_convert():
    with pytest.raises(
        ConversionError, match=r"Sequential has no linear layer to convert; .* of class Conv2d, LayerNorm"
    ):
        convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(4)), "current")
    with pytest.raises(ConversionError, match=r"no list of two or more children of one class; name the layers"):
        convert(nn.Sequential(nn.Linear(32, 32)), "current", first=1)
    with pytest.raises(ConversionError, match=r"nothing to revert: Linear has no converted layer"):
        revert(nn.Linear(32, 32))


def test_converting_twice_is_refused(gpt):
    model, _ = convert(gpt(), "delayed")
    with pytest.raises(ConversionError, match=r"already converted \(6 layers, to 'delayed'.*revert\(model\) first"):
        convert(model, "current")
    assert model.blocks[0].up._fp8.recipe.name == "delayed"


def test_what_a_model_shares_with_a_converted_one_stays_as_it_is(gpt):
    first, second = gpt(), gpt()
    second.blocks[0] = first.blocks[0]
    _, whole = convert(first, "delayed")
    shared, own = first.blocks[0].up._fp8, second.blocks[1].up
    model, report = convert(second, "current", beside=True)
    assert model.blocks[0].up._fp8 is shared
    assert own._fp8.recipe.name == "current"
    assert own._fp8.clock is not shared.clock
    names = [row.name for row in whole.rows if row.recipe]
    assert [row.name for row in report.rows if row.recipe] == [n for n in names if not n.startswith("blocks.0.")]
    with pytest.raises(ConversionError, match=r"Sequential has no linear layer to convert"):
        convert(nn.Sequential(first.blocks[0].up), "current", beside=True)


def test_unknown_words_name_the_nearest(gpt):
    with pytest.raises(RecipeError, match=r"did you mean 'delayed'\?"):
        convert(gpt(), "delaid")
    with pytest.raises(RecipeError, match=r"did you mean 'reference'\?"):
        convert(gpt(), "current", backend="referense")
    with pytest.raises(RecipeError, match=r"did you mean 'rowwise'\?"):
        convert(gpt(), "current", rules=(Rule.to("*.up", "rowise"), *O2))


def test_deepcopy_trains_and_evaluates_on_its_own(gpt, run_steps):
    model, _ = convert(gpt(), "delayed")
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    twin = copy.deepcopy(model)
    assert names(twin) == names(model)
    tokens = torch.arange(16)[None]
    expected = model.eval()(tokens)
    assert torch.equal(twin.eval()(tokens), expected)
    run_steps(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 3, start=2)
    assert torch.equal(model(tokens), expected)
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, start=2)
    assert torch.equal(twin(tokens), model(tokens))
    revert(twin)
    assert names(model)


def test_the_whole_model_saves_and_loads(gpt, run_steps):
    model, _ = convert(gpt(), "delayed")
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    again = [run_steps(m, torch.optim.SGD(m.parameters(), lr=0.1), 2, start=2) for m in (model, loaded)]
    assert again[0] == again[1]
