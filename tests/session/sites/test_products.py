"""Products outside of any known layer: who is heard, under which name, and with which numbers."""

import copy
import gc
import pickle

import pytest
import torch
from tests.session.sites.recorded import Rows, check, counted, recorded, same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from narrowgauge.observe.stats import Collector
from narrowgauge.session.sites.convolution import pixels, taps, transposed_taps
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.sites.products import Products


def rows(x):
    return x.detach().reshape(-1, x.shape[-1])


class Tied(nn.Module):
    """An embedding that is its own head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)

    def forward(self, ids):
        self.h = self.embed(ids)
        self.y = F.linear(self.h, self.embed.weight)
        self.y.retain_grad()
        return self.y


@pytest.mark.parametrize("training", [True, False])  # inside the model's call, or in a loss that is computed after it
def test_a_tied_head_is_seen_under_its_parameter(training):
    torch.manual_seed(0)
    model = Tied()
    x = torch.arange(12).view(2, 6)
    found, notes = recorded(model, lambda: model(x).square().sum().backward(), training=training)
    assert sorted(found) == ["embed:grad_output", "embed:input", "embed:weight"]
    same(found, "embed", rows(model.h), "input")
    same(found, "embed", model.embed.weight, "weight")
    same(found, "embed", rows(model.y.grad), "grad_output")
    assert notes == ""


class Ways(nn.Module):
    """One weight, multiplied in many ways; `turned` if it lies as [K, N]."""

    def __init__(self, turned, way):
        super().__init__()
        self.w = nn.Parameter(torch.randn((24, 16) if turned else (16, 24)) / 4)
        self.way = way

    def forward(self, x):
        self.y = self.way(x, self.w)
        self.y.retain_grad()
        return self.y


WAYS = {
    "x @ w": (True, lambda x, w: x @ w),
    "x.matmul(w)": (True, lambda x, w: x.matmul(w)),
    "mm": (True, lambda x, w: torch.mm(x.reshape(-1, 24), w)),
    "x @ w.t()": (False, lambda x, w: x @ w.t()),
    "x @ w.T cast": (False, lambda x, w: (x.bfloat16() @ w.bfloat16().T).float()),
    "addmm": (True, lambda x, w: torch.addmm(torch.zeros(16), x.reshape(-1, 24), w)),
    "linear of a turned parameter": (True, lambda x, w: F.linear(x, w.t())),
    "einsum": (True, lambda x, w: torch.einsum("bsk,kn->bsn", x, w)),
    "einsum, heads": (True, lambda x, w: torch.einsum("b s k, k n -> b s n", x, w)),
    "einsum, weight first": (False, lambda x, w: torch.einsum("nk,bsk->bsn", w, x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_multiplied_rows_are_tokens_and_output_features(way):
    torch.manual_seed(1)
    turned, product = WAYS[way]
    model = Ways(turned, product)
    x = torch.randn(2, 5, 24)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward(), "rowwise")
    assert sorted(found) == ["w:grad_output", "w:input", "w:weight"]
    seen = x.bfloat16().float() if "cast" in way else x
    same(found, "w", rows(seen), "input", "rowwise")
    same(found, "w", model.w.t() if turned else model.w, "weight", "rowwise")  # one scale for each output feature
    if "cast" not in way:
        same(found, "w", rows(model.y.grad), "grad_output", "rowwise")
    assert notes == ""


CONVOLVED = {  # a parameter, what is convolved with it, and how the parameter lies then
    "tied to its encoder": ((4, 6, 3), lambda x, w: F.conv1d(x, w.transpose(0, 1)), lambda w: w.transpose(0, 1)),
    "tied and cast": (
        (4, 6, 3),
        lambda x, w: F.conv1d(x.bfloat16(), w.bfloat16().transpose(0, 1)).float(),
        lambda w: w.transpose(0, 1),
    ),
    "a linear layer's": ((6, 4), lambda x, w: F.conv1d(x, w.unsqueeze(-1)), lambda w: w.unsqueeze(-1)),
    "the first outputs": ((8, 4, 3), lambda x, w: F.conv1d(x, w[:6]), lambda w: w),
    "the first inputs": ((6, 8, 3), lambda x, w: F.conv1d(x, w[:, :4]), lambda w: w),
    "torch.conv1d": ((6, 4, 3), lambda x, w: torch.conv1d(x, w), lambda w: w),
}


@pytest.mark.parametrize("way", CONVOLVED)
def test_a_parameter_is_convolved_with_however_it_was_laid_for_that(way):
    torch.manual_seed(1)
    shape, product, laid = CONVOLVED[way]
    model = Ways(False, product)
    model.w = nn.Parameter(torch.randn(shape))
    x = torch.randn(2, 4, 9)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward())
    assert sorted(found) == ["w:grad_output", "w:input", "w:weight"]
    same(found, "w", rows(x.bfloat16().float().mT if "cast" in way else x.mT), "input")
    same(found, "w", taps(laid(model.w)), "weight")
    if "cast" not in way:
        same(found, "w", rows(model.y.grad.mT), "grad_output")
    assert notes == ""


def test_an_equation_takes_a_weight_that_was_laid_by_heads():
    torch.manual_seed(1)
    model = Ways(False, lambda x, w: torch.einsum("bsk,hdk->bshd", x, w.view(4, 4, 24)))
    x = torch.randn(2, 5, 24)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward(), "rowwise")
    same(found, "w", rows(x), "input", "rowwise")
    same(found, "w", model.w, "weight", "rowwise")
    same(found, "w", model.y.grad.reshape(-1, 16), "grad_output", "rowwise")
    assert notes == ""


def test_a_weight_in_front_has_its_input_behind():
    torch.manual_seed(2)
    model = Ways(False, lambda x, w: w @ x.mT)
    x = torch.randn(2, 5, 24)
    found, _ = recorded(model, lambda: model(x).cos().sum().backward(), "rowwise")
    same(found, "w", rows(x), "input", "rowwise")
    same(found, "w", model.w, "weight", "rowwise")
    same(found, "w", rows(model.y.grad.mT), "grad_output", "rowwise")


def test_products_of_activations_are_no_sites():
    model = Ways(True, lambda x, w: (x @ x.mT) @ (x @ w))
    x = torch.randn(2, 5, 24)
    found, _ = recorded(model, lambda: model(x).sum().backward())
    assert sorted(found) == ["w:grad_output", "w:input", "w:weight"]
    same(found, "w", rows(x), "input")


def test_multihead_attention_shows_its_packed_weight_and_its_projection():
    torch.manual_seed(3)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    seen = []
    original = F.scaled_dot_product_attention

    def spy(q, k, v, *args, **kwargs):
        out = original(q, k, v, *args, **kwargs)
        for t in (q, k, v):
            t.retain_grad()
        out.retain_grad()
        seen.append((q, k, v, out))
        return out

    x, context = torch.randn(2, 6, 16), torch.randn(2, 6, 16)

    def step():
        model(x, context, context, need_weights=False)[0].cos().sum().backward()

    F.scaled_dot_product_attention = spy
    try:
        found, notes = recorded(model, step)
    finally:
        F.scaled_dot_product_attention = original
    assert notes == ""
    assert sorted(found) == [
        f"{name}:{role}" for name in ("in_proj_weight", "out_proj") for role in ("grad_output", "input", "weight")
    ]
    q, k, v, out = seen[0]
    same(found, "in_proj_weight", model.in_proj_weight, "weight")
    same(found, "in_proj_weight", [x, context], "input")
    same(found, "in_proj_weight", [q.grad, k.grad, v.grad], "grad_output")
    same(found, "out_proj", model.out_proj.weight, "weight")
    same(found, "out_proj", [out], "input")


class Cast(nn.Linear):
    """A layer that casts its master weight just before the product."""

    def forward(self, x):
        self.x = x * 3
        self.y = F.linear(self.x.bfloat16(), self.weight.bfloat16())
        self.y.retain_grad()
        return self.y


def test_a_subclass_shows_what_it_really_multiplies():
    torch.manual_seed(4)
    model = nn.Sequential(Cast(16, 8, bias=False))
    found, notes = recorded(model, lambda: model(torch.randn(5, 16)).float().cos().sum().backward())
    assert sorted(found) == ["0:grad_output", "0:input", "0:weight"]
    same(found, "0", model[0].x.bfloat16(), "input")
    same(found, "0", model[0].weight, "weight")
    same(found, "0", model[0].y.grad, "grad_output")
    assert notes == ""


def test_a_computed_weight_is_the_layers_own():
    torch.manual_seed(5)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)))
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(3)
    x = torch.randn(5, 16)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward())
    same(found, "0", x, "input")
    same(found, "0", model[0].weight, "weight")
    assert notes == ""


@pytest.mark.parametrize("layer", [nn.Linear(4, 6), nn.Conv1d(4, 6, 1)], ids=["linear", "convolution"])
def test_a_tensor_that_stands_in_the_place_of_a_parameter_is_the_weight(layer):
    class Flat(nn.Module):  # as FSDP does it while the model runs
        def __init__(self):
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x):
            p = self.layer._parameters.pop("weight")
            object.__setattr__(self.layer, "weight", 2 * p)
            try:
                return self.layer(x)
            finally:
                del self.layer.weight
                self.layer.weight = p

    torch.manual_seed(8)
    model, x = Flat(), torch.randn(5, 4) if isinstance(layer, nn.Linear) else torch.randn(2, 4, 5)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward())
    same(found, "layer", taps(2 * model.layer.weight), "weight")
    assert sorted(found) == ["layer:grad_output", "layer:input", "layer:weight"]
    assert notes == ""


def standardized(layer):
    """The layer with a forward of its own, which subtracts its weight's mean."""

    class Standardized(type(layer)):
        def forward(self, x):
            w = self.weight - self.weight.mean()
            if self.transposed:
                return F.conv_transpose1d(x, w, self.bias, groups=self.groups)
            return self._conv_forward(x, w, self.bias)

    layer.__class__ = Standardized
    return layer


@pytest.mark.parametrize("norm", [
    nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm,
    nn.utils.weight_norm, nn.utils.spectral_norm, standardized,
])  # fmt: skip
@pytest.mark.parametrize("layer", [
    nn.Conv2d(4, 6, 3, groups=2, padding=1, padding_mode="circular"), nn.ConvTranspose1d(6, 4, 3, groups=2),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_convolution_that_computes_its_weight_is_a_layer(norm, layer, monkeypatch):
    torch.manual_seed(7)
    model, seen = nn.Sequential(norm(copy.deepcopy(layer))), {}
    name = "conv2d" if isinstance(layer, nn.Conv2d) else "conv_transpose1d"
    function = getattr(F, name)

    def spied(x, w, *args, **kwargs):
        seen.update(x=x.detach(), w=w.detach(), y=function(x, w, *args, **kwargs))
        seen["y"].retain_grad()
        return seen["y"]

    monkeypatch.setattr(F, name, spied)
    x = torch.randn(2, 4, 5, 5) if name == "conv2d" else torch.randn(2, 6, 9)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward())
    dims = x.dim() - 2
    same(found, "0", pixels(seen["x"], dims, 2), "input")
    same(found, "0", taps(seen["w"]) if name == "conv2d" else transposed_taps(seen["w"], 2), "weight")
    same(found, "0", pixels(seen["y"].grad, dims, 2), "grad_output")
    assert sorted(found) == ["0:grad_output", "0:input", "0:weight"]
    assert notes == ""


def test_a_convolution_whose_inner_forward_was_replaced_shows_what_that_multiplies():
    """As programs do it that have a model's pictures wrap around, after it was made."""
    torch.manual_seed(7)
    layer, seen = nn.Conv2d(4, 6, 3, padding=1), {}

    def around(self, x, weight, bias):
        seen["x"] = F.pad(x, (1, 1, 1, 1), mode="circular")
        return F.conv2d(seen["x"], weight, bias, self.stride)

    layer._conv_forward = around.__get__(layer)
    model = nn.Sequential(layer)
    found, notes = recorded(model, lambda: model(torch.randn(2, 4, 5, 5)).cos().sum().backward())
    same(found, "0", pixels(seen["x"], 2, 1), "input")
    same(found, "0", taps(layer.weight), "weight")
    assert sorted(found) == ["0:grad_output", "0:input", "0:weight"]
    assert notes == ""


def test_a_subclass_that_multiplies_elsewhere_is_judged_by_its_input_and_gradient():
    class Odd(nn.Linear):
        def forward(self, x):
            return (x.unsqueeze(1) * self.weight).sum(-1)

    torch.manual_seed(6)
    model = nn.Sequential(Odd(16, 8))
    x = torch.randn(5, 16)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward())
    same(found, "0", x, "input")
    same(found, "0", model[0].weight, "weight")
    assert notes == "Layers of class Odd are judged as linear layers of their input and gradient."


def test_low_rank_adapters_are_layers_of_their_own():
    class Lora(nn.Module):  # as PEFT wraps a layer: the base frozen, two small ones beside it
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(16, 8).requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

        def forward(self, x):
            self.a = self.lora_A["default"](x)
            return self.base_layer(x) + self.lora_B["default"](self.a)

    torch.manual_seed(7)
    model, x = Lora(), torch.randn(5, 16, requires_grad=True)
    found, notes = recorded(model, lambda: model(x).cos().sum().backward())
    same(found, "base_layer", x, "input")
    same(found, "lora_A.default", x, "input")
    same(found, "lora_B.default", model.a, "input")
    same(found, "base_layer", model.base_layer.weight, "weight")
    assert "base_layer:grad_output" in found
    assert notes == ""


@pytest.mark.parametrize("way", [lambda x, w: F.linear(x, w), lambda x, w: x @ w])
def test_a_vector_that_is_multiplied_in_pieces_is_named_as_not_seen(way):
    class Flat(nn.Module):  # what a hypernetwork or a meta-learner keeps its weights in
        def __init__(self):
            super().__init__()
            self.flat, self.gate = nn.Parameter(torch.randn(2 * 8 * 8)), nn.Parameter(torch.randn(8))

        def forward(self, x):
            for w in self.flat.view(2, 8, 8):
                x = way(x, w) * self.gate
            return x @ self.gate

    model = Flat()
    found, notes = recorded(model, lambda: model(torch.randn(5, 8)).cos().sum().backward())
    assert not found
    assert notes == "Not seen as a weight in any recorded step: Flat (1 of them, 94.1% of all parameters: 'flat')."


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_recurrent_cell_is_named_with_why(cell):
    model = cell(8, 8)
    _, notes = recorded(model, lambda: model(torch.randn(5, 8))[0].sum().backward())
    assert notes.endswith(f" {cell.__name__} (1 of them, 88.9% of all parameters, multiplied inside one kernel).")


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_products_count_once(reentrant):
    torch.manual_seed(8)
    model = Ways(True, lambda x, w: checkpoint(lambda x: x @ w, x, use_reentrant=reentrant))
    micro = [torch.randn(2, 5, 24, requires_grad=True) for _ in range(2)]
    gradients = []

    def step():
        for x in micro:
            y = model(x)
            y.register_hook(lambda g: gradients.append(g.clone()))
            y.cos().sum().backward()

    found, _ = recorded(model, step)
    same(found, "w", micro, "input")
    same(found, "w", gradients, "grad_output")
    check(found["w:weight"], counted(model.w.t(), "weight"))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torch_is_as_it_was_found():
    names = [(F, "linear"), (torch, "matmul"), (torch, "_grouped_mm"), (F, "conv2d"), (torch, "einsum")]
    before = [getattr(*name) for name in names]
    methods = {name: name in vars(torch.Tensor) for name in ("__matmul__", "mm", "bmm", "matmul", "addmm", "baddbmm")}
    model = Tied()

    def step():
        ours = [getattr(*name) for name in names]
        assert not any(a is b for a, b in zip(ours, before, strict=True))
        assert ours == before
        assert pickle.loads(pickle.dumps(ours)) == ours
        assert torch.jit.script(scripted)(torch.ones(2, 2)).sum() == 8  # a scripted function finds torch's own
        raise KeyError("the program's")

    with pytest.raises(KeyError, match="the program's"):
        recorded(model, step)
    assert [getattr(*name) for name in names] == before
    assert {name: name in vars(torch.Tensor) for name in methods} == methods


def test_a_function_that_a_module_keeps_from_a_recorded_step_goes_on_as_torchs_own():
    """Also where `torch.overrides`, which looks once, first looks in such a step."""
    model, kept = Tied(), []

    def step():
        torch.overrides._get_overridable_functions.cache_clear()
        assert torch.overrides.resolve_name(F.linear) == "torch.nn.functional.linear"
        kept.extend([F.linear, torch.Tensor.matmul, nn.Sequential()])
        kept[2].act = F.linear
        model(torch.arange(4)).sum().backward()

    recorded(model, step)
    assert torch.overrides.resolve_name(F.linear) == "torch.nn.functional.linear"
    linear, matmul, module = kept
    assert pickle.loads(pickle.dumps(linear)) is copy.deepcopy(module).act is F.linear
    assert pickle.loads(pickle.dumps(matmul)) is torch.Tensor.matmul
    x = torch.randn(4, 4)
    assert torch.equal(linear(x, x), F.linear(x, x))
    assert torch.equal(matmul(x, x), x @ x)
    held = gc.get_referents(*(vars(each) for each in (linear, matmul)))
    assert not any(type(each).__module__.startswith("narrowgauge") for each in held)


def test_a_function_in_the_body_of_a_class_is_no_method_where_torchs_own_is_none():
    model, made = Tied(), []

    def step():
        class Own:
            product, turned, of_tensors = torch.matmul, F.linear, torch.Tensor.matmul

        made.append(Own())
        model(torch.arange(4)).sum().backward()

    recorded(model, step)
    x, (own,) = torch.randn(4, 4), made
    assert torch.equal(own.product(x, x), x @ x)
    assert torch.equal(own.turned(x, x), F.linear(x, x))
    with pytest.raises(TypeError):
        own.of_tensors(x, x)  # it is given the object first, as without a watch


def scripted(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, x) @ torch.eye(2) + torch.matmul(x, x) * 0 + torch.mm(x, x) * 0


def test_a_function_that_the_program_puts_there_between_steps_or_within_one_is_called_and_stays(monkeypatch):
    monkeypatch.setattr(F, "linear", F.linear)  # as it was, when the test ends
    model, calls, steps = Tied(), [], PlainSites("current", eager=True, training=lambda: True)
    steps.add(model, Collector(Rows(), every=1))
    given = F.linear

    def theirs(x, w, bias=None):
        calls.append("theirs")
        return given(x, w, bias)

    for turn in range(3):
        steps.begin()
        if turn == 1:  # in the midst of a recorded step: it may well keep ours as what it calls
            given, F.linear = F.linear, theirs
        model(torch.arange(4)).sum().backward()
        steps.end()
        assert (F.linear is theirs) == (turn >= 1)
    assert calls == ["theirs"] * 2
    F.linear = lambda x, w, bias=None: calls.append("another") or theirs(x, w, bias)
    steps.begin()
    model(torch.arange(4)).sum().backward()
    steps.end()
    assert calls[2:] == ["another", "theirs"]


def test_torchscript_takes_no_later_function_for_one_of_torch_s():
    table = torch.jit._builtins._get_builtin_table()
    gc.collect()
    before = dict(table)
    products = Products(lambda part, known: None, lambda what, error: None)
    products.open()
    products.close()
    assert len(table) > len(before)
    del products
    gc.collect()
    assert table == before


def test_numbers_of_the_program_do_not_change():
    results = []
    for watched in (False, True):
        torch.manual_seed(9)
        model = nn.Sequential(nn.MultiheadAttention(16, 2), Ways(True, lambda x, w: x[0] @ w[:16]))
        x = torch.randn(6, 2, 16)

        def step(model=model, x=x):
            (model[1](model[0](x, x, x)).cos().sum() * 3).backward()

        recorded(model, step) if watched else step()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_error_of_ours_stays_with_us(monkeypatch):
    from narrowgauge.session.sites import products

    def broken(call):
        raise ValueError("what it does not know")
        yield

    monkeypatch.setattr(products, "_FUNCTIONS", ((F, "linear", broken),))
    model = Tied()
    found, notes = recorded(model, lambda: model(torch.arange(4)).sum().backward())
    assert found == {}
    assert notes.startswith(
        "Watching a product by linear failed, and its numbers are missing: ValueError: what it does not know. "
        "Training goes on."
    )
    assert notes.endswith(
        "Not seen as a weight in any recorded step: Embedding (1 of them, 100.0% of all parameters, looked up, not "
        "multiplied)."
    )


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_meanwhile_has_nothing_of_ours(strict):
    model, other, made = Tied(), nn.Linear(8, 8), []

    def export():
        graph = torch.export.export(other, (torch.ones(2, 8),), strict=strict).graph
        made.append([str(node.target) for node in graph.nodes])

    export()
    recorded(model, export)
    assert made[0] == made[1]


class Own(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x


class ByHand(nn.Module):
    def __init__(self, learns=True):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16) / 4, requires_grad=learns)

    def forward(self, x):
        return Own.apply(x, self.w)


@pytest.mark.parametrize("learns", [True, False])
def test_a_gradient_inside_of_an_autograd_function_is_named_where_its_weight_learns(learns):
    model = nn.Sequential(nn.Linear(16, 16), ByHand(learns))
    found, notes = recorded(model, lambda: model(torch.randn(4, 16)).square().sum().backward())
    assert sorted(found) == [*(f"0:{role}" for role in ("grad_output", "input", "weight")), "1.w:input", "1.w:weight"]
    assert notes.startswith("Gradients not seen: 1.w. ") if learns else notes == ""


def test_a_gradient_that_comes_when_the_forward_is_recomputed_is_seen():
    model = nn.Linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    found, notes = recorded(model, lambda: checkpoint(model, x, use_reentrant=True).square().sum().backward())
    assert ":grad_output" in found
    assert notes == ""
