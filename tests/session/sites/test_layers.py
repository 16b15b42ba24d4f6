"""Experts and convolutions: what is a row, what is contracted, and one scale for whom."""

import pytest
import torch
from tests.session.sites.recorded import check, counted, recorded, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from narrowgauge.compute.quant import Block, BLOCK_128x128, quantize
from narrowgauge.compute.recipes import by_name
from narrowgauge.session.sites.experts import quantize_experts


def rows(x):
    return x.detach().reshape(-1, x.shape[-1])


class Experts(nn.Module):
    """Three experts in one parameter, [E, N, K], or [E, K, N] if it lies turned."""

    def __init__(self, product, turned):
        super().__init__()
        self.up = nn.Parameter(torch.randn((3, 24, 16) if turned else (3, 16, 24)))
        with torch.no_grad():
            self.up *= torch.tensor([1.0, 300.0, 0.01]).view(3, 1, 1)
        self.product = product

    def forward(self, x):
        self.y = self.product(x, self.up)
        for y in self.y if isinstance(self.y, list) else [self.y]:
            y.retain_grad()
        return sum(y.sum() for y in self.y) if isinstance(self.y, list) else self.y.float().cos().sum()


OFFSETS = torch.tensor([3, 8, 12], dtype=torch.int32)
GROUPED = {
    "grouped_mm": (False, lambda x, w: F.grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), offs=OFFSETS)),
    "_grouped_mm, turned": (True, lambda x, w: torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=OFFSETS)),
    "bmm": (True, lambda x, w: torch.bmm(x.view(3, 4, 24), w)),
    "baddbmm": (True, lambda x, w: torch.baddbmm(torch.zeros(3, 1, 16), x.view(3, 4, 24), w)),
    "matmul": (False, lambda x, w: x.view(3, 4, 24) @ w.mT),
    "einsum": (False, lambda x, w: torch.einsum("etk,enk->etn", x.view(3, 4, 24), w)),
}


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
@pytest.mark.parametrize("product", GROUPED)
def test_experts_are_scaled_each_for_itself(product, recipe):
    torch.manual_seed(0)
    turned, run = GROUPED[product]
    model, x = Experts(run, turned), torch.randn(12, 24)
    found, notes = recorded(model, lambda: model(x).backward(), recipe)
    assert sorted(found) == ["up:grad_output", "up:input", "up:weight"]
    w = model.up.detach().mT if turned else model.up.detach()
    per_expert = Block(16, 24) if recipe == "current" else None
    check(found["up:weight"], counted(w.reshape(48, 24), "weight", recipe, per_expert))
    assert found["up:weight"]["scale_max"] > 1000 * found["up:weight"]["scale_min"]
    same(found, "up", x.bfloat16() if "grouped" in product else x, "input", recipe)
    same(found, "up", rows(model.y.grad), "grad_output", recipe)
    assert notes == ""


@pytest.mark.parametrize("index", [lambda w, e: w[e], lambda w, e: w[torch.tensor(e)]])
def test_experts_one_after_another_are_one_site(index):
    torch.manual_seed(1)
    model, x = Experts(lambda x, w: [F.linear(x[4 * e : 4 * e + 4], index(w, e)) for e in range(3)], False), None
    x = torch.randn(12, 24)
    found, _ = recorded(model, lambda: model(x).backward())
    same(found, "up", [x], "input")
    same(found, "up", [y.grad for y in model.y], "grad_output")
    check(found["up:weight"], counted(model.up.reshape(48, 24), "weight", granularity=Block(16, 24)))


def test_tokens_that_fetch_their_own_expert_show_the_parameter_once():
    torch.manual_seed(2)
    chosen = torch.tensor([0, 2, 2, 1])
    model = Experts(lambda x, w: torch.bmm(w[chosen], x.unsqueeze(-1)).squeeze(-1), False)
    x = torch.randn(4, 24)
    found, _ = recorded(model, lambda: model(x).backward())
    same(found, "up", x, "input")
    same(found, "up", model.y.grad, "grad_output")
    check(found["up:weight"], counted(model.up.reshape(48, 24), "weight", granularity=Block(16, 24)))


@pytest.mark.parametrize("N", [128, 72])
def test_squares_do_not_straddle_experts(N):
    torch.manual_seed(3)
    w = torch.randn(3, N, 200) * torch.tensor([1.0, 300.0, 0.01]).view(3, 1, 1)
    rule = by_name("blockwise").uses("weight")[0]
    assert rule.granularity == BLOCK_128x128
    q = quantize_experts(w, rule)
    each = [quantize(expert, rule.fmt, rule.granularity, scaling=rule.scaling).dequantize() for expert in w]
    assert torch.equal(q.dequantize(), torch.cat(each))


def unfolded(x, kernel, dims):
    """Every pixel of an image as a row, channels last."""
    return x.detach().movedim(1, -1).reshape(-1, x.shape[1])


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_is_seen_by_its_pixels_and_taps(dims):
    torch.manual_seed(4)
    model = nn.Sequential(getattr(nn, f"Conv{dims}d")(6, 4, 3, stride=2, padding=1))
    x, seen = torch.randn(2, 6, *[5] * dims), []

    def step():
        y = model(x)
        y.retain_grad()
        seen.append(y)
        y.cos().sum().backward()

    found, notes = recorded(model, step, "rowwise")
    same(found, "0", unfolded(x, 3, dims), "input", "rowwise")
    same(found, "0", model[0].weight.detach().movedim(1, -1).reshape(4, -1), "weight", "rowwise")
    same(found, "0", unfolded(seen[0].grad, 3, dims), "grad_output", "rowwise")
    assert notes == ""


def test_blocks_along_channels_give_the_codes_of_the_unfolded_matrix():
    torch.manual_seed(5)
    rule = by_name("blockwise").uses("input")[0]
    x = torch.randn(1, 256, 4, 4)
    pixels = quantize(unfolded(x, 3, 2), rule.fmt, rule.granularity, scaling=rule.scaling).dequantize()
    by_taps = F.unfold(x, 3).view(256, 9, 4).permute(2, 1, 0).reshape(4, -1)  # K = (tap, channel)
    whole = quantize(by_taps, rule.fmt, rule.granularity, scaling=rule.scaling).dequantize()
    back = F.unfold(pixels.view(1, 4, 4, 256).permute(0, 3, 1, 2), 3).view(256, 9, 4).permute(2, 1, 0).reshape(4, -1)
    assert torch.equal(whole, back)


def test_the_groups_of_a_convolution_are_products_of_their_own():
    torch.manual_seed(6)
    model, x = nn.Sequential(nn.Conv2d(6, 4, 3, groups=2)), torch.randn(2, 6, 5, 5)
    found, _ = recorded(model, lambda: model(x).sum().backward(), "rowwise")
    same(found, "0", unfolded(x, 3, 2).reshape(-1, 3), "input", "rowwise")
    assert found["0:grad_output"]["numel"] == 2 * 4 * 9


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_contracts_its_input_channels(groups):
    torch.manual_seed(7)
    model, x = nn.Sequential(nn.ConvTranspose2d(6, 4, 3, groups=groups)), torch.randn(2, 6, 5, 5)
    found, _ = recorded(model, lambda: model(x).cos().sum().backward(), "rowwise")
    same(found, "0", unfolded(x, 3, 2).reshape(-1, 6 // groups), "input", "rowwise")
    w = model[0].weight.detach()  # [C, N / groups, 3, 3]
    parts = [w[g * 6 // groups : (g + 1) * 6 // groups].flatten(1).t() for g in range(groups)]
    same(found, "0", torch.cat(parts), "weight", "rowwise")


def test_a_kernel_that_is_multiplied_as_a_matrix_is_one():
    torch.manual_seed(8)

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(8, 3, 2, 2))

        def forward(self, x):
            return F.linear(x, self.kernel.view(8, -1))

    model, x = Patches(), torch.randn(5, 12)
    found, _ = recorded(model, lambda: model(x).sum().backward(), "rowwise")
    same(found, "kernel", model.kernel.detach().view(8, 12), "weight", "rowwise")


def test_what_is_not_seen_is_named_with_its_share():
    model = nn.ModuleDict(
        {
            "e": nn.Embedding(8, 4),
            "b": nn.Bilinear(4, 4, 2, bias=False),
            "l": nn.Linear(4, 2, bias=False),
            "n": nn.Linear(4, 1, bias=False),
        }
    )

    def step():
        h = model["e"](torch.arange(3))
        (model["b"](h, h) + model["l"](h)).sum().backward()

    found, notes = recorded(model, step)
    assert sorted(found) == ["l:grad_output", "l:input", "l:weight"]
    assert notes == (
        "Not seen as a weight in any recorded step: Embedding (1 of them, 42.1% of all parameters, looked up, not "
        "multiplied); Bilinear (1 of them, 42.1% of all parameters, a product of three tensors); Linear (1 of them, "
        "5.3% of all parameters: 'n')."
    )


def test_what_fsdp2_wraps_by_itself_is_what_it_was(alone):
    """It is an FSDPEmbedding then, of which nothing seemed to be known."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 3, bias=False))
    mesh = init_device_mesh("cpu", (1,))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    _, notes = recorded(model, lambda: model(torch.arange(3)).sum())
    assert "Embedding (1 of them, 57.1% of all parameters, looked up, not multiplied)" in notes
    assert "FSDP" not in notes


class Unheard(nn.Module):
    """Multiplies in ways that are not listened to."""

    def __init__(self):
        super().__init__()
        for name in ("dot", "multi", "aten", "vector"):
            self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))

    def forward(self, x):
        x = torch.linalg.multi_dot([torch.tensordot(x, self.dot, dims=1), self.multi, x.mT])
        return torch.mv(self.vector, torch.ops.aten.mm(x, self.aten)[0])


def test_parameters_whose_product_is_not_heard_are_named():
    model = nn.ModuleDict({"one": Unheard(), "two": nn.Linear(8, 8)})
    found, notes = recorded(model, lambda: model["one"](model["two"](torch.randn(8, 8))).sum().backward())
    assert sorted(found) == ["two:grad_output", "two:input", "two:weight"]
    assert notes == (
        "Not seen as a weight in any recorded step: Unheard (1 of them, 78.0% of all parameters: 'one.dot', "
        "'one.multi', 'one.aten' and 1 more)."
    )


@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24), (1, 2, 3, 24)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_place", [torch.relu_, lambda y: y.mul_(2.0), lambda y: y[..., :4].zero_()])
def test_the_gradient_of_a_result_that_is_changed_in_place_is_the_one_from_before_the_change(shape, bias, in_place):
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(24, 16, bias=bias)), torch.randn(shape)

    def loss(watch):
        y = layer(x)
        made = y + 0.0 if watch is None else y  # by hand: of a sum, and not changed itself
        if watch is None:
            y.retain_grad()
        in_place(made)
        made.cos().sum().backward()
        return y

    found, _ = recorded(layer, lambda: loss("watched"))
    want = loss(None).grad
    same(found, "0", want.reshape(-1, 16), "grad_output")
