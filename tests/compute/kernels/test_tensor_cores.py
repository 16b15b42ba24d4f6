"""What the tensor cores are told adds up what it should: its PTX, carried out for 32 lanes as the ISA lays them out.

    A [16, k]   register r of lane l: row l / 4 + 8 (r % 2), columns 2 (l % 4) + 8 (r / 2) and the next
    B [k, 8]    register r of lane l: rows 2 (l % 4) + 8 r and the next, column l / 4
    C [16, 8]   register r of lane l: row l / 4 + 8 (r / 2), column 2 (l % 4) + r % 2

Triton's interpreter knows no PTX, and there may be no GPU. Source: PTX ISA, fragments of mma.m16n8k8 and m16n8k16.
"""

import re

import numpy as np
import pytest

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused.watched import tensor_cores as told

EACH, LANE = told.EACH.value, np.arange(32)
ROW, PAIR = LANE >> 2, 2 * (LANE & 3)
KINDS = {
    "bf16": (told.ADD_BF16.value, lambda bits: (bits.astype(np.uint32) << 16).view(np.float32), 0x3F80, 0x7F7F),
    "f16": (
        told.ADD_FP16.value,
        lambda bits: bits.astype(np.uint16).view(np.float16).astype(np.float32),
        0x3C00,
        0x7BFF,
    ),
}


class Warp:
    """32 lanes: operands of an `inline_asm_elementwise` by their numbers, and registers by their names."""

    def __init__(self, operands, number, one):
        self.held = {f"${i}": value for i, value in operands.items()} | {"%laneid": LANE.astype(np.uint32)}
        self.number, self.one = number, one

    def __getitem__(self, name):
        if name in self.held:
            return self.held[name]
        bits = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        kind = np.float32 if name.startswith("0f") else np.uint32
        return np.full(32, bits, np.uint32).view(kind)

    def halves(self, name):
        word = self[name].astype(np.uint32)
        return self.number(word & 0xFFFF), self.number(word >> 16)

    def run(self, text):
        body = re.fullmatch(r"\s*\{(.*)\}\s*", text, re.S)[1]
        for statement in filter(None, (line.strip() for line in body.replace("\n", " ").split(";"))):
            name, _, rest = statement.partition(" ")
            groups = [group.split(", ") for group in re.findall(r"\{(.*?)\}", rest)]
            operands = re.sub(r"\{.*?\}", "", rest).replace(" ", "").split(",")
            if name == ".reg":
                continue
            if name.startswith("mma"):
                self.multiply(int(re.search(r"m16n8k(\d+)", name)[1]), *groups)
            else:
                self.held[operands[0]] = self.compute(name, *operands[1:])
        return self

    def compute(self, name, *of):
        if name.startswith("set.le"):
            pairs = zip(self.halves(of[0]), self.halves(of[1]), strict=True)
            low, high = (np.where(a <= b, self.one, 0) for a, b in pairs)
            return (low | high << 16).astype(np.uint32)
        does = {
            "mov.b32": lambda a: a, "mov.u32": lambda a: a, "mov.f32": lambda a: a, "add.f32": np.add,
            "shr.u32": np.right_shift, "and.b32": np.bitwise_and, "setp.eq.u32": np.equal,
            "selp.f32": lambda a, b, p: np.where(p, a, b),
        }  # fmt: skip
        return does[name](*[self[operand] for operand in of])

    def multiply(self, k, to, left, right, onto):
        assert (len(left), len(right)) == (k // 4, k // 8)
        a, b, c = np.full((16, k), np.nan), np.full((k, 8), np.nan), np.full((16, 8), np.nan)
        for r, name in enumerate(left):
            for i, half in enumerate(self.halves(name)):
                a[ROW + 8 * (r % 2), PAIR + i + 8 * (r // 2)] = half
        for r, name in enumerate(right):
            for i, half in enumerate(self.halves(name)):
                b[PAIR + i + 8 * r, ROW] = half
        for r, name in enumerate(onto):
            c[ROW + 8 * (r // 2), PAIR + r % 2] = self[name]
        c = (c + a @ b).astype(np.float32)
        for r, name in enumerate(to):
            self.held[name] = c[ROW + 8 * (r // 2), PAIR + r % 2]


def several(first, rows):
    return {first + i: row for i, row in enumerate(rows)}


def packed(low, high):
    return (low | high << 16).astype(np.uint32)


@pytest.mark.parametrize("limit", [0, 1, 5, 0x80, 0x400, 0x2000])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_squares_and_counts_of_a_warp(kind, limit):
    """Magnitudes are given by their bits: some are zeros, some the limit itself, some one above."""
    text, number, one, _ = KINDS[kind]
    rng = np.random.default_rng(limit)
    squares, sums = np.zeros((EACH, 32), np.float32), np.zeros((EACH, 32), np.float32)
    seen = []
    for _ in range(3):
        halves = rng.integers(0, 0x4100, (2, EACH, 32))
        which = rng.random(halves.shape)
        for share, bits in enumerate((0, limit, limit + 1)):
            halves[(which >= share / 10) & (which < (share + 1) / 10)] = bits
        seen.append(halves)
        words = packed(*(halves | rng.integers(0, 2, halves.shape) << 15))
        u = packed(*((halves - 1) & 0xFFFF))
        least = np.full(32, (limit - 1 & 0xFFFF) * 0x10001, np.uint32)
        operands = several(2 * EACH, words) | several(3 * EACH, u) | several(4 * EACH, [least] * EACH)
        warp = Warp(operands | several(5 * EACH, squares) | several(6 * EACH, sums), number, one).run(text)
        squares, sums = (np.stack([warp[f"${first + i}"] for i in range(EACH)]) for first in (0, EACH))
        signed = [number(half) for half in (words & 0xFFFF, words >> 16)]
        seen[-1] = halves, np.stack(signed).astype(np.float64)
    read = Warp(several(3 * EACH, squares) | several(4 * EACH, sums), number, one).run(told.READ.value)
    square, total, count = (
        sum(read[f"${EACH * n + i}"].astype(np.float64).sum() for i in range(EACH)) for n in range(3)
    )
    x, magnitudes = np.concatenate([x for _, x in seen]), np.concatenate([bits for bits, _ in seen])
    assert count == np.count_nonzero((magnitudes > 0) & (magnitudes <= limit))
    assert square == pytest.approx((x * x).sum(), rel=1e-6)
    assert total == pytest.approx(x.sum(), abs=1e-6 * np.abs(x).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_on_the_right_side_of_a_limit(kind):
    """Inf and NaN, which have no u below any limit's, zeros, subnormals, and the largest number among them."""
    text, number, one, largest = KINDS[kind]
    every = np.arange(1 << 15)
    for limit in (0, 1, 0x7F, largest):
        counted = 0
        for words in every.reshape(-1, EACH, 32):
            u, least = packed(words - 1 & 0xFFFF, np.full_like(words, 0xFFFF)), np.full(32, limit - 1 & 0xFFFF)
            operands = several(2 * EACH, np.zeros((EACH, 32), np.uint32)) | several(3 * EACH, u)
            none = np.zeros((EACH, 32), np.float32)
            operands |= several(4 * EACH, [least] * EACH) | several(5 * EACH, none) | several(6 * EACH, none)
            warp = Warp(operands, number, one).run(text)
            counted += sum(warp[f"${EACH + 4 + i}"][::4].sum() for i in (0, 2))
        assert counted == limit
