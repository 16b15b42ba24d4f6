"""Copies of weights by one kernel: sums of squares as in float64, of all and of what moved."""

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused.moved import PIECE, Copies

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = (
    *((1, torch.float32), (PIECE + 4465, torch.bfloat16), (5, torch.bfloat16), (2 * PIECE, torch.float32)),
    *((3000, torch.float16), (PIECE, torch.float32), (PIECE - 1, torch.bfloat16)),
)


def made(seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=g).to(dtype).to(DEVICE) for size, dtype in KINDS]


def addresses(tensors):
    return [x.data_ptr() for x in tensors]


@pytest.mark.parametrize("turn", [0, 5, 1000])
@pytest.mark.parametrize("stride", [1, 7, 73])
def test_sums_are_those_of_float64(stride, turn):
    before, after = made(0), made(1)
    copies = Copies([x.numel() for x in before], [x.dtype for x in before], DEVICE, stride)
    for _ in range(2):  # the second time with the tables that are there
        whole = float(copies.copy(addresses(before), turn))
        moved = float(copies.moved(addresses(after), turn))  # all of them lie elsewhere
        assert whole == pytest.approx(sum(float(x.double().square().sum()) for x in before), rel=1e-7)
        by_hand = 0.0
        for x, y in zip(before, after, strict=True):
            start = turn % min(stride, x.numel())
            by = (y.double() - x.double())[start::stride]
            by_hand += float(by.square().sum()) * x.numel() / by.numel()
        assert moved == pytest.approx(by_hand, rel=1e-7)


def test_what_stays_in_place_is_copied_and_not_remembered():
    tensors = made(0)
    copies = Copies([x.numel() for x in tensors], [x.dtype for x in tensors], DEVICE, 7)
    copies.copy(addresses(tensors), 3)
    for x in tensors:
        x += 1  # where they are
    moved = float(copies.moved(addresses(tensors), 3))
    assert moved == pytest.approx(sum(x.numel() for x in tensors), rel=1e-2)  # but for what 16 bits round
    copies.copy(addresses(tensors), 4)
    assert float(copies.moved(addresses(tensors), 4)) == 0.0


def test_an_address_that_is_no_multiple_of_16_is_read_right():
    room = torch.randn(PIECE + 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = room[3:-1]
    copies = Copies([x.numel()], [x.dtype], DEVICE, 5)
    assert float(copies.copy([x.data_ptr()], 2)) == pytest.approx(float(x.double().square().sum()), rel=1e-7)
    whole = room[:-4]
    assert (
        float(copies.moved([whole.data_ptr()], 2))
        == pytest.approx(  # now of another alignment
            float((whole.double() - x.double())[2::5].square().sum()) * x.numel() / len(whole[2::5]), rel=1e-7
        )
    )
