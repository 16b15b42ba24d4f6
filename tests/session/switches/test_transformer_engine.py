"""`[[high]]` on TransformerEngine's layers, through a small stand-in for it (`engine.py`)."""

import copy
import pickle
import sys

import pytest
import torch
from tests.session.inline import followed
from tests.session.switches import engine
from torch import nn

from narrowgauge.errors import ConversionError
from narrowgauge.session.sites.transformer_engine import KEPT_HIGH
from narrowgauge.session.switches import foreign
from narrowgauge.session.switches.te_hooks import Nothing
from narrowgauge.session.switches.te_parts import parts

GEMMS = ("fprop", "dgrad", "wgrad")


@pytest.fixture(autouse=True)
def te(monkeypatch):
    parts.cache_clear()
    yield engine.install(monkeypatch)
    parts.cache_clear()


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"a": engine.Linear(), "b": engine.Linear()})


def switch(net, *tables, converting=False, called=None):
    return foreign.switch(net, list(tables), net if called is None else called, converting=converting)


def multiplied(layer, *args, recipe=None, fp8=True):
    """Its three products of the same tensors."""
    torch.manual_seed(1)
    x = torch.randn(64, 32, requires_grad=True)
    layer.zero_grad()
    with engine.Autocast(fp8, False, recipe or engine.Recipe()):
        y = layer(x, *args)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": torch.cat([p.grad.flatten() for p in layer.parameters()])}


def same(found, want):
    return {gemm for gemm in GEMMS if torch.equal(found[gemm], want[gemm])}


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
@pytest.mark.parametrize("gemms", [("fprop",), ("dgrad",), ("wgrad",), ("fprop", "wgrad"), GEMMS], ids="-".join)
@pytest.mark.parametrize("kind", [engine.Linear, engine.GroupedLinear])
def test_a_product_that_stays_high_is_the_plain_one_and_the_others_are_what_they_were(kind, gemms, delayed):
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": kind(), "b": kind()})
    untouched = copy.deepcopy(net)
    args = ([24, 40],) if kind is engine.GroupedLinear else ()
    told = switch(net, {"sites": ["a"], "gemms": list(gemms)}).told
    assert told == {"a": ", ".join(f"{gemm} high" for gemm in gemms)}
    for _ in range(3):  # a delayed scale moves with each
        recipe = engine.Recipe(delayed=delayed)
        found, was = multiplied(net["a"], *args, recipe=recipe), multiplied(untouched["a"], *args, recipe=recipe)
        high = multiplied(copy.deepcopy(untouched["a"]), *args, fp8=False)
        assert same(found, high) == set(gemms)
        assert same(found, was) == set(GEMMS) - set(gemms)
        assert same(multiplied(net["b"], *args, recipe=recipe), multiplied(untouched["b"], *args, recipe=recipe)) == {
            *GEMMS
        }


@pytest.mark.parametrize(
    ("table", "want"),
    [
        ({"gemms": ["fprop"], "keep": "bf16_gemm"}, ("fprop", "codes", "codes")),
        ({"gemms": ["dgrad"], "keep": "bf16_gemm"}, ("dgrad", "codes", "codes")),
        ({"gemms": ["wgrad"], "keep": "bf16_gemm"}, ("wgrad", "codes", "codes")),
        ({"gemms": ["fprop"], "roles": ["input"]}, ("fprop", "high", "codes")),
        ({"gemms": ["fprop"], "roles": ["weight"]}, ("fprop", "codes", "high")),
        ({"gemms": ["dgrad"], "roles": ["grad_output"]}, ("dgrad", "high", "codes")),
        ({"gemms": ["wgrad"], "roles": ["input"]}, ("wgrad", "codes", "high")),
    ],
)
def test_one_operand_high_or_codes_multiplied_high(table, want):
    net = model()
    was = multiplied(copy.deepcopy(net["a"]))
    switch(net, {"sites": ["a"], **table})
    found = multiplied(net["a"])
    gemm, a, b = want
    torch.manual_seed(1)
    x, w = torch.randn(64, 32), net["a"].weight.detach()
    dy = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    first, second, turn = {
        "fprop": (x, w, lambda x, w: x @ w.t()),
        "dgrad": (dy, w, lambda dy, w: dy @ w),
        "wgrad": (dy, x, lambda dy, x: (dy.t() @ x).flatten()),
    }[gemm]
    by = engine.Float8CurrentScalingQuantizer()
    taken = [t if form == "high" else by.quantize(t).dequantize() for t, form in ((first, a), (second, b))]
    assert torch.equal(found[gemm], turn(*taken))
    assert same(found, was) == set(GEMMS) - {gemm}


def test_an_operand_in_all_of_its_products_and_tables_add_up():
    net = model()
    told = switch(net, {"sites": ["a"], "roles": ["grad_output"]}, {"sites": ["*", "!b"], "gemms": ["fprop"]}).told
    assert told == {"a": "fprop high, dgrad grad_output high, wgrad grad_output high"}
    high = multiplied(copy.deepcopy(net["a"]), fp8=False)
    assert same(multiplied(net["a"]), high) == {"fprop"}


def test_a_whole_layer_is_called_outside_of_its_autocast_and_the_autocast_is_left_as_it_was():
    net = model()
    switch(net, {"sites": ["a"]})
    with engine.Autocast(True, False, engine.Recipe(delayed=True)):
        net["a"](torch.randn(16, 32))
        assert (engine.State.enabled, engine.State.depth, engine.State.recipe.delayed) == (True, 1, True)
        net["b"](torch.randn(16, 32))
        with pytest.raises(RuntimeError):
            net["a"](torch.randn(16, 31))
        assert (engine.State.enabled, engine.State.depth) == (True, 1)
    assert (net["a"].fp8, net["b"].fp8) == (False, True)
    assert not net["a"].quantizers["scaling_fwd"]


def test_a_call_that_was_interrupted_is_counted_as_ended():
    net = model()
    switch(net, {"sites": ["a"]})

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = net["a"].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), engine.Autocast(True):
        net["a"](torch.randn(16, 32))
    handle.remove()
    assert engine.State.depth == 1  # as it stays for TransformerEngine
    with engine.Autocast(True):
        net["a"](torch.randn(16, 32))
        assert (engine.State.enabled, engine.State.depth) == (True, 1)
    assert (engine.State.enabled, engine.State.depth) == (False, 0)


@pytest.mark.parametrize("table", [{"sites": ["a"]}, {"sites": ["a"], "gemms": ["wgrad"]}], ids=["whole", "wgrad"])
def test_at_the_end_nothing_of_ours_is_left(table):
    net = model()
    multiplied(net["a"], True)
    own = list(net["a"].quantizers["scaling_fwd"])
    kept = switch(net, table)
    assert not net["a"]._fp8_workspaces  # made by other quantizers
    before, _ = multiplied(net["b"]), multiplied(net["a"], True)
    assert kept.undo() == []
    assert kept.undo() == []
    assert not net["a"]._forward_pre_hooks
    assert not net["a"]._forward_hooks
    assert not net["a"]._fp8_workspaces
    assert net["a"] not in KEPT_HIGH
    assert all(found is had for found, had in zip(net["a"].quantizers["scaling_fwd"], own, strict=True))
    assert same(multiplied(net["a"]), multiplied(model()["a"])) == {*GEMMS}
    assert same(multiplied(net["b"]), before) == {*GEMMS}


@pytest.mark.parametrize("gemms", [("fprop",), ("dgrad",), ("wgrad",)], ids="-".join)
def test_weights_that_are_kept_for_further_microbatches(gemms):
    net = model()
    switch(net, {"sites": ["a"], "gemms": list(gemms)})
    want = multiplied(net["a"])
    for first in (True, False, True):
        assert same(multiplied(net["a"], first), want) == {*GEMMS}
    with torch.no_grad():
        net["a"].weight.mul_(1.5).add_(0.01)
    assert "fprop" not in same(multiplied(net["a"], True), want)
    want = multiplied(net["a"])
    assert same(multiplied(net["a"], False), want) == {*GEMMS}
    delayed = {"recipe": engine.Recipe(delayed=True)}  # other quantizers: what the ones before made is dropped
    found = multiplied(net["a"], False, **delayed)
    assert same(found, multiplied(copy.deepcopy(net["a"]), fp8=False)) == {*gemms}
    assert len(same(found, want)) <= 1


def test_the_amax_history_goes_on_as_it_would():
    plain, net = model(), model()
    switch(net, {"sites": ["a"], "gemms": ["wgrad"]})
    for one in (plain, net):
        engine.State.metas = []
        for _ in range(3):
            multiplied(one["a"], recipe=engine.Recipe(delayed=True))
        one.scales = [scale.item() for _, scale in engine.State.metas]
    assert net.scales == plain.scales
    assert len(set(net.scales)) > 2


@pytest.mark.parametrize(
    "table", [{"gemms": ["fprop"]}, {"gemms": ["fprop"], "keep": "bf16_gemm"}], ids=["high", "codes"]
)
def test_a_forward_without_gradients_leaves_the_amax_that_it_would(table):
    plain, net = model(), model()
    switch(net, {"sites": ["a"], **table})
    for one in (plain, net):
        engine.State.metas = []
        for _ in range(2):
            with torch.no_grad(), engine.Autocast(True, False, engine.Recipe(delayed=True)):
                one["a"](torch.arange(64.0).reshape(2, 32))
        one.amaxes = [amax.item() for amax, _ in engine.State.metas]
    assert net.amaxes == plain.amaxes
    assert net.amaxes[0] == 63  # of the input, which a checkpoint's recomputation does not write


def test_another_recipe_an_evaluation_outside_and_a_recomputed_forward():
    net = model()
    switch(net, {"sites": ["a"], "gemms": ["dgrad"]})
    high = multiplied(copy.deepcopy(net["a"]), fp8=False)
    assert same(multiplied(net["a"]), high) == {"dgrad"}
    assert same(multiplied(net["a"], fp8=False), high) == {*GEMMS}
    assert same(multiplied(net["a"], recipe=engine.Recipe(delayed=True)), high) == {"dgrad"}
    assert same(multiplied(net["a"]), high) == {"dgrad"}
    want, made = multiplied(net["a"]), list(net["a"].quantizers["scaling_bwd"])
    engine.State.recomputes = True
    assert same(multiplied(net["a"], recipe=engine.Recipe(delayed=True)), want) == {*GEMMS}
    assert net["a"].quantizers["scaling_bwd"] == made


def test_what_stays_high_is_in_the_dtype_of_the_layer_s_products(monkeypatch):
    net = nn.ModuleDict({"a": engine.Linear(dtype=torch.bfloat16)})
    switch(net, {"sites": ["a"], "gemms": ["fprop"]})
    with engine.Autocast(True):
        y = net["a"](torch.randn(16, 32, dtype=torch.bfloat16))
    by_rows = net["a"].quantizers["scaling_fwd"][0].rowwise_quantizer
    assert (y.dtype, by_rows.dtype) == (torch.bfloat16, torch.bfloat16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    with engine.Autocast(True):
        y = net["a"](torch.randn(16, 32))
    assert (y.dtype, by_rows.dtype) == (torch.float16, torch.float16)


def test_copies_and_pickles_of_a_layer_are_the_layer_s_own():
    net = model()
    kept = switch(net, {"sites": ["a"], "gemms": ["wgrad"]}, {"sites": ["b"]})
    multiplied(net["a"], recipe=engine.Recipe(delayed=True))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert all(isinstance(hook, Nothing) for hook in other["a"]._forward_pre_hooks.values())
        assert [type(q) for q in other["a"].quantizers["scaling_fwd"]] == [engine.Float8Quantizer] * 3
        high = multiplied(copy.deepcopy(net["b"]), fp8=False)
        assert not same(multiplied(other["a"]), multiplied(other["a"], fp8=False))
        assert not same(multiplied(other["b"]), high)
    kept.undo()


def test_a_copy_of_a_layer_has_no_use_for_weights_that_were_kept_for_further_microbatches():
    net = model()
    switch(net, {"sites": ["a"], "gemms": ["fprop"]})
    multiplied(net["a"], True)
    other, want = copy.deepcopy(net["a"]), multiplied(model()["a"])
    for first in (False, True, False):
        assert same(multiplied(other, first), want) == {*GEMMS}
    assert other._fp8_workspaces  # dropped once


@pytest.mark.parametrize(
    "table",
    [{"gemms": ["wgrad"]}, {"gemms": ["fprop", "dgrad"]}, {"keep": "bf16_gemm"}],
    ids=["hybrid", "rows", "codes"],
)
def test_a_quantizer_that_a_tensor_holds_is_copied_whole_and_pickled_as_one_of_transformer_engine_s(table):
    net = model()
    switch(net, {"sites": ["a"], **table})
    want = multiplied(net["a"], True)
    held = net["a"].quantizers["scaling_fwd"]
    for made in held[:2]:
        once = made.copy()
        again = once.copy()
        assert type(again) is type(once) is type(made)
        assert {**vars(again)}.keys() == {**vars(made)}.keys() - {"theirs"}
        kind = type(pickle.loads(pickle.dumps(again)))
        assert kind in (engine.HybridQuantizer, engine.IdentityQuantizer, engine.Float8CurrentScalingQuantizer)
    held[0], held[1] = held[0].copy().copy(), held[1].copy().copy()
    held[0].theirs = held[1].theirs = object()
    assert same(multiplied(net["a"], True), want) == {*GEMMS}


def refused(**has):
    layer = engine.Linear()
    vars(layer).update(has)
    return layer


@pytest.mark.parametrize(
    ("layer", "table", "words"),
    [
        (engine.LayerNormMLP, {"gemms": ["wgrad"]}, "'x' is a LayerNormMLP .* can only stay high whole; name all"),
        (engine.LayerNormMLP, {"roles": ["input"]}, r"or leave it out \('!x'\)"),
        (engine.LayerNormMLP, {"keep": "bf16_gemm"}, "takes? no composed ones"),
        (lambda: refused(primary_weights_in_fp8=True), {}, r"weights in FP8 alone, .* say gemms = \['wgrad'\]"),
        (lambda: refused(primary_weights_in_fp8=True), {"gemms": ["dgrad"]}, "so only its wgrad can stay high"),
        (lambda: refused(use_grouped_tensor=True), {"gemms": ["dgrad"]}, "make it with use_grouped_tensor=False"),
        (lambda: refused(ub_overlap_rs_fprop=True, ub_name="fc"), {}, "buffers made for FP8; make it without ub_"),
        (
            engine.Linear,
            {"sites": ["x.fc1"]},
            r"high 'x.fc1' matches no module of the model; its linear layers: 'y', 'x'\.",
        ),
    ],
)
def test_what_transformer_engine_cannot_do_is_refused_and_nothing_is_changed(layer, table, words):
    net = nn.ModuleDict({"y": engine.Linear(), "x": layer()})
    with pytest.raises(ConversionError, match=words):
        switch(net, table)
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_version_without_the_parts_can_only_keep_whole_layers(monkeypatch):
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch.tensor.hybrid_tensor"], "HybridQuantizer")
    with pytest.raises(ConversionError, match=r"TransformerEngine 2\.20\.2, without HybridQuantizer \(2\.20 has it\)"):
        switch(model(), {"gemms": ["wgrad"]})
    assert switch(model(), {}).told == dict.fromkeys("ab", "fprop high, dgrad high, wgrad high")


def test_fp8_weights_and_whole_fused_layers_where_it_can():
    net = nn.ModuleDict({"x": refused(primary_weights_in_fp8=True), "y": engine.LayerNormMLP()})
    told = switch(net, {"sites": ["x"], "gemms": ["wgrad"]}, {"sites": ["y"]}).told
    assert told == {"x": "wgrad high", "y": "fprop high, dgrad high, wgrad high"}
    want = multiplied(copy.deepcopy(net["y"]), fp8=False)
    assert same(multiplied(net["y"]), want) == {*GEMMS}


def test_what_was_not_switched_is_told():
    net = model()
    kept = switch(net, {"sites": ["a"], "gemms": ["wgrad"]}, {"sites": ["b"]})
    was = multiplied(model()["a"], recipe=engine.Recipe(backward_override="dequantized"))
    assert same(multiplied(net["a"], recipe=engine.Recipe(backward_override="dequantized")), was) == {*GEMMS}
    multiplied(net["b"], fp8=False)
    assert kept.undo() == [
        "high: 'a' of TransformerEngine was not switched: ValueError: the program's recipe has its backward in high "
        "precision already ('dequantized').",
        "high: 'b' of TransformerEngine was never called in FP8; there was nothing to switch.",
    ]


def test_tables_may_speak_of_layers_that_are_converted_and_of_these():
    net = nn.ModuleDict({"a": engine.Linear(), "head": nn.Linear(48, 8)})
    tables = [{"sites": ["a"]}, {"sites": ["a", "head"], "gemms": ["wgrad"]}, {"gemms": ["dgrad"]}, {"sites": ["!a"]}]
    kept = switch(net, *tables, converting=True)
    assert kept.tables == [
        {"sites": ["head"], "gemms": ["wgrad"]},
        {"gemms": ["dgrad"], "sites": ["*"]},
        {"sites": ["*"]},
    ]
    with pytest.raises(ConversionError, match="high 'haed' matches no module of the model; did you mean 'head'"):
        switch(net, {"sites": ["haed"]}, converting=True)


@pytest.mark.parametrize("table", [{}, {"gemms": ["wgrad"]}], ids=["whole", "wgrad"])
def test_a_model_that_is_one_layer_is_switched_in_the_call_that_it_is_found_in(table):
    layer, found = engine.Linear(), {}

    def finds(module, args):
        if not found:
            found["kept"] = switch(layer, table, called=module)

    high = multiplied(copy.deepcopy(layer), fp8=False)
    handle = nn.modules.module.register_module_forward_pre_hook(finds)
    try:
        assert same(multiplied(layer), high) == ({"wgrad"} if table else {*GEMMS})
        assert engine.State.depth == 0
    finally:
        handle.remove()
        found["kept"].undo()


def run(tmp_path, net, high, steps=2, fp8=True):
    rows = [{"roles": [], "keep": "high", "gemms": list(GEMMS), **table} for table in high]
    losses = []
    with followed(tmp_path, every=1, judge="current", compiling=True, convert={"high": rows}) as (session, writer):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(steps):
            torch.manual_seed(step)
            with engine.Autocast(fp8):
                loss = net(torch.randn(64, 32)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return session.facts(), {site for _, names, _ in writer.tensors for site in names}, losses


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = engine.Linear(), engine.Linear(48, 32), engine.Linear()

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def test_a_watched_program_and_its_rows(tmp_path):
    net = Net()
    facts, sites, _ = run(tmp_path, net, [{"sites": ["a"]}, {"sites": ["b"], "gemms": ["dgrad", "wgrad"]}])
    assert facts["switched"] == {"a": "fprop high, dgrad high, wgrad high", "b": "dgrad high, wgrad high"}
    assert facts["unmet"] == []
    assert sites == {"b:input", "b:weight", "c:input", "c:weight", "c:grad_output"}
    told = [note for note in facts["notes"] if "high precision" in note]
    assert told == [
        f"TransformerEngine leaves the {role} of some layers in high precision; it is not recorded."
        for role in ("input", "weight", "grad_output")
    ]
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert all(type(q) is engine.Float8CurrentScalingQuantizer for q in net.b.quantizers["scaling_bwd"])


def test_the_program_s_own_words_give_the_same_losses(tmp_path):
    class Written(Net):
        def forward(self, x):
            with engine.Autocast(False):
                x = self.a(x)
            return self.c(self.b(x))

    _, _, want = run(tmp_path, Written(), [])
    _, _, found = run(tmp_path, Net(), [{"sites": ["a"]}])
    _, _, plain = run(tmp_path, Net(), [])
    assert found == want
    assert found != plain


def test_a_layer_that_never_ran_in_fp8_is_told_once_more_when_the_command_ends(tmp_path):
    facts, _, _ = run(tmp_path, Net(), [{"sites": ["a"]}], fp8=False)
    told = "high: 'a' of TransformerEngine was never called in FP8; there was nothing to switch."
    assert facts["unmet"] == [told]
    assert told in facts["notes"]


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_and_layers_are_switched_as_well():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(64, 32)
    high = multiplied(copy.deepcopy(net.a), fp8=False)
    kept = switch(net, {"sites": ["a"]}, {"sites": ["b"], "gemms": ["fprop"]})
    compiled, layer = torch.compile(net, backend="eager"), torch.compile(net.a, backend="eager")
    with engine.Autocast(True):
        found, want = compiled(x), net(x)
    assert torch.equal(found, want)
    assert not net.a.fp8
    assert same(multiplied(layer), high) == {*GEMMS}
    assert engine.State.depth == 0
    assert kept.undo() == []
    torch._dynamo.reset()
