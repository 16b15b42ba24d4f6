"""Convolutions of every kind in a loop of one's own, nothing but torch, as pictures lie in memory or channels last."""

import pytest
import torch
import torch.nn.functional as F
from tests.integrations.by_hand_convolutions import kernel, padded, rows
from tests.integrations.watched import ROLES, check_logged, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith
from torch import nn

WORKS = WorksWith(
    "PyTorch, convolutions",
    ("torch",),
    "1d to 3d, strided, dilated, grouped, depthwise, transposed, BF16 autocast",
)
LAYERS = {"stem.0", "down", "grouped", "depthwise", "wraps", "up", "rows", "cube", "spread", "head"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module", params=["contiguous", "channels_last"])
def seen(request, tmp_path_factory, warm_python):
    return play(WORKS, tmp_path_factory, "convolutions", warm=warm_python, really=False, LAYOUT=request.param)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)
    check_logged(seen, seen.watched.said)


def test_every_tensor_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert set(want) == {(n, f"{layer}:{role}") for n in range(1, 7) for layer in LAYERS for role in ROLES}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 4, (3, 2), stride=2, padding=1, bias=False),
        nn.Conv2d(6, 4, 3, dilation=2, groups=2, bias=False),
        nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular", groups=6, bias=False),
    ],
    ids=["strided", "grouped", "padded"],
)
def test_rows_and_kernel_by_hand_multiply_to_the_layer_s_result(layer):
    image = torch.randn(1, 6, 7, 8)
    x = padded(layer, image)
    numbers = torch.arange(1.0, x[0, 0].numel() + 1).view(1, 1, *x.shape[2:])  # 0 is around the picture
    around = layer.padding if layer.padding_mode == "zeros" else 0
    which = F.unfold(numbers, layer.kernel_size, layer.dilation, around, layer.stride)[0].int()  # [taps, P]
    pixels = torch.cat([torch.zeros(1, 6), rows(x, layer.groups).view(-1, 6)])[which]
    each = pixels.unflatten(2, (layer.groups, -1))
    w = kernel(layer).view(layer.groups, -1, len(which), each.shape[3])
    y = torch.einsum("tpgc,gntc->pgn", each, w).flatten(1)
    torch.testing.assert_close(y, rows(layer(image), 1))


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_and_kernel_by_hand_of_a_transposed_one_multiply_to_what_is_scattered(groups):
    layer, x = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, groups=groups, bias=False), torch.randn(1, 6, 5, 5)
    each, w = rows(x, groups).view(-1, groups, 6 // groups), kernel(layer).view(groups, -1, 6 // groups)
    products = torch.einsum("pgc,gnc->gnp", each, w).reshape(1, 4 * 9, 25)
    torch.testing.assert_close(F.fold(products, (9, 9), 3, padding=1, stride=2), layer(x))
