"""Copies of weights by one kernel: sums of squares as in float64, of all and of what moved."""

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused import moved
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


def square(x):
    return float(x.double().square().sum())


@pytest.mark.parametrize("turn", [0, 5, 1000])
@pytest.mark.parametrize("stride", [1, 7, 73])
def test_sums_are_those_of_float64(stride, turn):
    before, after = made(0), made(1)
    copies = Copies([x.numel() for x in before], [x.dtype for x in before], DEVICE, stride)
    by_hand = 0.0
    for x, y in zip(before, after, strict=True):
        by = (y.double() - x.double())[turn % min(stride, x.numel()) :: stride]
        by_hand += square(by) * x.numel() / by.numel()
    for _ in range(2):  # the second time with the tables that are there
        total, copied = copies.copy(addresses(before), turn)
        assert float(total) == pytest.approx(sum(map(square, before)), rel=1e-7)
        # all of them lie elsewhere by now
        assert float(copies.moved(addresses(after), turn, copied)) == pytest.approx(by_hand, rel=1e-7)


def test_what_stays_in_place_is_copied_and_not_remembered():
    tensors = made(0)
    copies = Copies([x.numel() for x in tensors], [x.dtype for x in tensors], DEVICE, 7)
    _, copied = copies.copy(addresses(tensors), 3)
    for x in tensors:
        x += 1  # where they are
    by = float(copies.moved(addresses(tensors), 3, copied))
    assert by == pytest.approx(sum(x.numel() for x in tensors), rel=1e-2)  # but for what 16 bits round
    _, copied = copies.copy(addresses(tensors), 4)
    assert float(copies.moved(addresses(tensors), 4, copied)) == 0.0


def test_a_table_that_could_not_be_made_is_made_anew(monkeypatch):
    before, after = made(0), made(1)
    copies = Copies([x.numel() for x in before], [x.dtype for x in before], DEVICE, 1)
    copies.copy(addresses(before), 0)

    def full(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(moved, "Launch", full)
    with pytest.raises(MemoryError):
        copies.copy(addresses(after), 0)
    monkeypatch.undo()
    total, _ = copies.copy(addresses(after), 0)
    assert float(total) == pytest.approx(sum(map(square, after)), rel=1e-7)


def test_an_address_that_is_no_multiple_of_16_is_read_right():
    room = torch.randn(PIECE + 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x, other = room[3:-1], room[:-4]
    copies = Copies([x.numel()], [x.dtype], DEVICE, 5)
    total, copied = copies.copy(addresses([x]), 2)
    assert float(total) == pytest.approx(square(x), rel=1e-7)
    by = (other.double() - x.double())[2::5]
    by_hand = square(by) * x.numel() / by.numel()
    assert float(copies.moved(addresses([other]), 2, copied)) == pytest.approx(by_hand, rel=1e-7)
