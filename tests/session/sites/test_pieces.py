"""A weight that is multiplied piece by piece by one input: that input comes once, the gradients are all pieces'."""

import pytest
import torch
from tests.session.sites.recorded import recorded, same
from torch import nn
from torch.nn import functional as F


class Head(nn.Module):
    """Logits in tiles of its weight, as losses make them that never hold all of them."""

    def __init__(self, way, tiles=((0, 8), (8, 24), (24, 32))):
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.way, self.tiles = way, tiles

    def forward(self, x):
        self.h = self.body(x)
        self.ys = [y for a, b in self.tiles for y in self.way(self.h, self.head.weight[a:b])]
        for y in self.ys:
            y.retain_grad()
        return sum(y.cos().sum() for y in self.ys)


class Tiled(torch.autograd.Function):
    """The same where no gradient is followed, into memory that is used again."""

    @staticmethod
    def forward(ctx, h, weight, tiles):
        room, total = torch.empty(len(h), 16), torch.zeros(())
        for a, b in tiles:
            total = total + torch.mm(h, weight[a:b].t(), out=room[:, : b - a]).cos().sum()
        return total

    @staticmethod
    def backward(ctx, g):
        return None, None, None


def halves(h, w):
    """Tokens in two, inside of the loop over tiles."""
    return [F.linear(part, w) for part in h.chunk(2)]


WAYS = {
    "linear": lambda h, w: [F.linear(h, w)],
    "linear of views": lambda h, w: [F.linear(h.view(2, 3, 16), w)],
    "mm": lambda h, w: [torch.mm(h, w.t())],
    "cast": lambda h, w: [F.linear(h, w.double().float())],
    "tokens in two": halves,
}


@pytest.mark.parametrize("way", WAYS)
def test_its_input_is_shown_once(way):
    torch.manual_seed(0)
    model = Head(WAYS[way])
    found, notes = recorded(model, lambda: model(torch.randn(6, 16)).backward())
    same(found, "head", [model.h], "input")
    same(found, "head", model.head.weight, "weight")
    same(found, "head", [y.grad for y in model.ys], "grad_output")
    assert notes == ""


def test_so_it_is_where_no_gradient_is_followed():
    torch.manual_seed(1)
    model = Head(None)
    x = torch.randn(6, 16)
    found, _ = recorded(model, lambda: Tiled.apply(model.body(x), model.head.weight, model.tiles))
    same(found, "head", [model.body(x)], "input")
    same(found, "head", model.head.weight, "weight")


CASTS = {
    "slices": lambda w, a, b: w[a:b].double().float(),
    "narrowed": lambda w, a, b: w.narrow(0, a, b - a).double().float(),
    "every other": lambda w, a, b: w[a // 2 % 2 + a // 4 * 4 :: 2][:2].double().float(),
    "turned": lambda w, a, b: w.t()[:, a:b].double().float().t(),
    "split": lambda w, a, b: w.split(2)[a // 2].double().float(),
    "split unevenly": lambda w, a, b: w.split([a, 2, 30 - a])[1].double().float(),
    "chunks of a half": lambda w, a, b: w.chunk(2)[a // 16].chunk(8)[a // 2 % 8].double().float(),
    "selected": lambda w, a, b: w.view(16, 2, 16)[a // 2].double().float(),
    "unbound": lambda w, a, b: w.view(16, 2, 16).unbind()[a // 2].double().float(),
    "by strides": lambda w, a, b: w.as_strided((2, 16), (16, 1), 16 * a).double().float(),
    "chosen": lambda w, a, b: w[torch.arange(a, b)].double().float(),
    "index_select": lambda w, a, b: w.index_select(0, torch.arange(a, b)).double().float(),
}
PAIRS = [(a, a + 2) for a in range(0, 32, 2)]


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_piece_at_the_address_of_one_that_is_gone_is_another(cast, learns):
    torch.manual_seed(6)
    filled = []
    for _ in range(50):  # one lies where another did: mostly, not always, and sooner where other places are taken
        filled += [torch.empty(2, 16, dtype=dtype) for dtype in (torch.float32, torch.float64) for _ in range(99)]
        head = nn.Linear(16, 32, bias=False)
        h, addresses = torch.randn(6, 16, requires_grad=learns), []

        def step(head=head, h=h, addresses=addresses):
            for a, b in PAIRS:
                piece = cast(head.weight, a, b)
                addresses.append(piece.data_ptr())
                F.linear(h, piece).cos().sum().backward()  # each by itself, and then its piece is gone
                del piece

        found, notes = recorded(nn.Sequential(head), step)
        same(found, "0", [h], "input")
        assert notes == ""
        if len(set(addresses)) < len(addresses):
            return
    pytest.fail("no piece lay where another had been")


@pytest.mark.parametrize("cast", [cast for name, cast in CASTS.items() if name not in ("chosen", "index_select")])
def test_one_that_is_cast_again_is_the_same(cast):
    torch.manual_seed(7)
    head = nn.Linear(16, 32, bias=False)
    model, h = nn.Sequential(head), torch.randn(6, 16)

    def step():
        sum(F.linear(h, cast(head.weight, a, b)).cos().sum() for a, b in PAIRS * 2).backward()

    found, _ = recorded(model, step)
    same(found, "0", [h, h], "input")


def test_what_is_multiplied_by_the_same_piece_again_comes_again():
    torch.manual_seed(2)
    model = Head(WAYS["linear"], [(0, 8), (8, 32), (0, 8), (8, 32)])
    found, _ = recorded(model, lambda: model(torch.randn(6, 16)).backward())
    same(found, "head", [model.h, model.h], "input")


def test_so_does_other_data_in_the_same_memory():
    torch.manual_seed(3)
    model = Head(WAYS["linear"])
    model.body = nn.Identity()
    x = torch.randn(6, 16)
    before = x.clone()

    def step():
        model(x).backward()
        x.copy_(torch.randn(6, 16))
        model(x).backward()

    found, _ = recorded(model, step)
    same(found, "head", [before, x], "input")


def test_a_whole_weight_is_no_piece():
    torch.manual_seed(4)
    model = Head(WAYS["linear"], [(0, 32), (0, 32)])
    found, _ = recorded(model, lambda: model(torch.randn(6, 16)).backward())
    same(found, "head", [model.h, model.h], "input")


def test_experts_in_one_parameter_have_each_their_own_tokens():
    torch.manual_seed(5)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x):
            return sum(F.linear(x, w).cos().sum() for w in self.w)

    model, x = Experts(), torch.randn(6, 16)
    found, _ = recorded(model, lambda: model(x).backward())
    same(found, "w", [x, x, x], "input")


def test_a_picture_that_comes_with_each_piece_of_the_taps_is_shown_once():
    torch.manual_seed(0)
    model = nn.Conv1d(4, 6, 3)
    x = torch.randn(2, 4, 9)

    def step():
        (F.conv1d(x, model.weight[:2]).cos().sum() + F.conv1d(x, model.weight[2:]).sin().sum()).backward()

    found, _ = recorded(model, step)
    same(found, "", x.mT.reshape(-1, 4), "input")
    assert found[":grad_output"]["numel"] == 2 * 7 * 6
