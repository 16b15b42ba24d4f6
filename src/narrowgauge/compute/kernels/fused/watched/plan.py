"""How the work on one watched tensor is cut into programs, and which of its rows stand for all.

    cast       walks over `steps` tiles, below or beside each other                 everything
    errors     rows m with m % share == turn % share                                a share, another one every turn
    sample     rows turn % stride + i * stride                                      about 65,536 elements

Both distances are primes, lest rows that repeat (the heads of one token) be met by one of their kind only. A share of 1
is everything.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rows import LONGEST, whole
from narrowgauge.compute.kernels.fused.watched.sampling import SAMPLE_ROWS
from narrowgauge.metrics.bins import RANGE_BLOCK
from narrowgauge.metrics.primes import last_prime

SEGMENT = 128  # columns of a tile
SHARE, COMPARED = 31, 128  # of so many rows of a large tensor, or more if that leaves so many, one is compared
LARGE, HIGH = 1 << 22, 1024  # elements and rows from which on a share is enough
RUN = 8  # words summed by one thread before anything else
HOLD, TOGETHER = 1024, 16  # words of whole rows that a program holds at once, and how many rows it takes in turn
FEW_ROWS = 4  # whole rows that a program compares, or as many as it holds
LONG = 4096  # words of a row above which a thread holds four times as many: else one program fills a multiprocessor
UNIT_ROWS, UNIT_WORDS = Constant(128), Constant(64)  # whose largest number is the unit of sums under many scales
RECOUNTED = 16  # rows looked at together where something is rare
REGISTERS = 128  # of a thread: sixteen warps to a multiprocessor; what is not 16 bits wide needs more
# Arguments whose values are no reason to compile again.
LATE = ["samples", "errors", "lines", "segments", "first", "stride", "sampled", "share", "phase"]
SAMPLE = 1 << 16  # elements that histograms and kurtosis come from, about


def pieces(n: int, size: int) -> int:
    """How many pieces of a size cover n."""
    return -(-n // size)


@dataclass(frozen=True)
class Walk:
    """The way of a program that casts: over `steps` tiles of `rows` x SEGMENT, one below or one beside the other.

    A tensor that would have fewer than `enough` programs gets more of them, with half of the steps or less. A program
    that looks at errors takes `compared` rows, or half of that. Of `whole` rows no columns are cut off, but for those
    that look at errors: their sums want too many registers, so that `parts` of them lie side by side.
    """

    rows: int
    steps: int
    down: bool
    enough: int = 0
    compared: int = 128
    whole: bool = False
    parts: int = 1


TENSOR = Walk(32, 16, down=True, enough=2048)  # one scale for all
TILES = Walk(128, 1, down=True)  # a tile is a block; a program of several keeps more than its registers hold
PLAIN_TILES = Walk(128, 2, down=True, enough=1536)  # but where only plain codes are made, or none
SQUARES = Walk(128, 1, down=True, compared=32)  # in a launch of their own, which needs more programs
PLAIN_SQUARES = Walk(128, 2, down=True, enough=1024, compared=32)
LINES = Walk(32, 16, down=False, enough=1024)  # a scale per row, found once for all tiles


@cache
def plain_lines(K: int) -> Walk:
    """Where no turned codes are made, a program holds whole rows, unless K is odd or too large."""
    if K % 2 or K // 2 > LONGEST:
        return LINES
    rows = whole(K // 2, HOLD, 512)[1]
    steps, compared, parts = max(1, TOGETHER // rows), max(FEW_ROWS, rows), 4 if K // 2 > LONG else 2
    return Walk(rows, steps, down=True, enough=512, compared=compared, whole=True, parts=parts)


@dataclass(frozen=True)
class Plan:
    """How the work on one tensor [M, K] is cut, and which rows stand for all."""

    M: int
    K: int
    share: int
    walk: Walk

    @classmethod
    @cache
    def of(cls, M: int, K: int, walk: Walk = TENSOR) -> Plan:
        """A share of a large tensor, all of a small one."""
        return cls(M, K, last_prime(max(SHARE, M // COMPARED)) if M * K >= LARGE and M >= HIGH else 1, walk)

    @cached_property
    def segments(self) -> int:
        """Programs side by side."""
        return self.walk.parts if self.walk.whole else pieces(self.K, SEGMENT)

    @cached_property
    def steps(self) -> int:
        """Tiles of a program that casts, some of them perhaps beyond the last."""
        tiles = pieces(self.M, self.walk.rows) if self.walk.down else self.segments
        steps = min(self.walk.steps, 1 << (tiles - 1).bit_length())
        while steps > 1 and self._programs(steps) < self.walk.enough:
            steps //= 2
        return steps

    @cached_property
    def programs(self) -> int:
        """Programs that cast."""
        return self._programs(self.steps)

    def _programs(self, steps: int) -> int:
        if self.walk.whole:
            return pieces(self.M, self.walk.rows * steps)
        if self.walk.down:
            return pieces(self.M, self.walk.rows * steps) * self.segments
        return pieces(self.M, self.walk.rows) * pieces(self.segments, steps)

    @cached_property
    def lines(self) -> int:
        """Rows taken, some of them perhaps beyond the last."""
        return pieces(self.M, self.share)

    @cached_property
    def error_lines(self) -> int:
        """Rows of a program that looks at errors."""
        most = self.walk.compared
        return most if self.walk.whole or self.lines > most // 2 else most // 2

    @cached_property
    def bands(self) -> int:
        """Programs below each other that look at errors."""
        return pieces(self.lines, self.error_lines)

    @cached_property
    def errors(self) -> int:
        """Programs that look at errors."""
        return self.bands * self.segments

    @cached_property
    def sampled(self) -> int:
        """Rows of the sample."""
        return min(self.M, max(1, SAMPLE // self.K // SAMPLE_ROWS) * SAMPLE_ROWS)

    @cached_property
    def stride(self) -> int:
        """Rows from one of the sample to the next."""
        return last_prime(self.M // self.sampled)

    @cached_property
    def samples(self) -> int:
        """Programs that look at the sample."""
        return pieces(self.sampled, SAMPLE_ROWS) * pieces(self.K, RANGE_BLOCK)

    def compared_rows(self, turn: int) -> Tensor:
        """Which rows' errors are summed in a turn, int64."""
        m = torch.arange(self.M, device="cpu")
        return m[m % self.share == turn % self.share]

    def sampled_rows(self, turn: int) -> Tensor:
        """Which rows the histograms come from in a turn, int64."""
        return turn % self.stride + self.stride * torch.arange(self.sampled, device="cpu")

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """What a kernel is told: samples, errors, lines, segments, stride, sampled, share."""
        return self.samples, self.errors, self.lines, self.segments, self.stride, self.sampled, self.share
