"""What is left of a walk once the scales are known, shared out among threads: losses, errors, histograms.

    a run      some rows that lie together            whole numbers, added up thread by thread
    a chunk    some of the rows that are looked at    sums, added up chunk by chunk

There are as many chunks for any number of threads, so sums are the same to the last bit. What a thread does is in
host_part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import literal_unroll

from narrowgauge.observe.stats.host_bits import Array, Number, compiled
from narrowgauge.observe.stats.host_part import (
    FOUND,
    NUMBERS,
    OF_SAMPLE,
    ROOM,
    SUMS,
    TOLD,
    add_columns,
    walk_part,
)  # fmt: skip
from narrowgauge.observe.stats.host_sample import TALLIES, add_tallies, merge_central, sqnr_bin
from narrowgauge.observe.stats.host_team import GRAIN, by_all, whom

CHUNKS, ROWS = 16, 8  # as many at most, of so many compared rows at least
TALL = 16  # rows of the matrix to a chunk, at least: what threads keep of each is then less than the matrix
FEW = 64  # rows that are not shared: the room of many threads could be larger than they are
HEAVIER = 2  # times what an element costs that is only surveyed
SHARED = GRAIN // HEAVIER  # elements from which on anything of a walk is shared

_walk_by_all: Any = by_all(walk_part)


@compiled
def compare(
    x_at: Number, matrix: Array, first: int, first_compared: int, step: int, facts: Array, limits: Array,
    of_granules: Array, low_of: Array, smallest: Number, team_at: Number, lost: Array, sums: Array, columns: Array,
    row_bins: Array, column_bins: Array, exponents: Array, ranges: Array,
) -> bool:  # fmt: skip
    """All that is found once scales are known; False if a code is no number.

    Args:
        x_at: address of x.
        matrix: ASKED of `host_kernel`.
        first, first_compared: the first row that is sampled, and that is compared.
        step, low_of, smallest: as for `survey`.
        facts, limits: FACTS and LIMITS.
        of_granules: [GRANULE, G] int32; of the scales and inverses the bits.
        team_at: address of a TEAM, 0 without one.
        lost: [2] float64 out: how many were flushed, and saturated.
        sums: [SUMS] float64 out: of the compared rows, and of the sampled ones.
        columns: [2, K] float64, to which the sums of x^2 and e^2 along columns are added.
        row_bins, column_bins, exponents, ranges: histograms, to which is added.
    """
    shift, stride, codes_at, every, every_compared = matrix[0], matrix[1], matrix[2], matrix[5], matrix[7]
    M, K, tall, wide = matrix[8], matrix[9], matrix[10], matrix[11]
    rows = -(-(M - first_compared) // every_compared)
    chunks, longest = max(1, min(CHUNKS, rows // ROWS, M // TALL)), max(step * K, K)
    run, threads = whom(team_at, 0 if M < FEW else HEAVIER * M * K)
    kept = chunks if run and chunks > 1 else 0  # by one thread, each is added as it is done
    by_thread, by_chunk = np.zeros((threads, len(FOUND))), np.empty((chunks, len(SUMS)))
    signals, errors, parts = np.empty(rows), np.empty(rows), np.empty((max(1, kept), 2, K))
    room, tallies = np.empty((threads, ROOM, longest), np.int32), np.empty((threads, TALLIES), np.int32)
    told = np.empty(TOLD, np.int64)
    numbers = (
        x_at, shift, M, K, stride, step, codes_at, tall, wide, first, every,
        first_compared, every_compared, of_granules.shape[1], chunks, kept, longest, np.int64(smallest),
        team_at if run else 0,
    )  # fmt: skip
    for i, number in enumerate(numbers):
        told[i] = number
    i, held = len(NUMBERS), (
        facts, limits, of_granules, low_of, by_thread, by_chunk, signals, errors, columns, parts, room, tallies,
    )  # fmt: skip
    for array in literal_unroll(held):
        told[i] = np.int64(array.ctypes.data)
        i += 1
    _walk_by_all(run, np.int64(told.ctypes.data), threads)
    lost[:], sums[:] = 0.0, by_chunk[0]
    for thread in range(threads):
        if not by_thread[thread, 0]:  # OpenMP may give fewer than it was asked for
            continue
        if by_thread[thread, 3]:
            return False
        lost[0] += by_thread[thread, 1]
        lost[1] += by_thread[thread, 2]
        add_tallies(tallies[thread], exponents, ranges)
    for chunk in range(1, chunks):
        for i in range(OF_SAMPLE):
            sums[i] += by_chunk[chunk, i]
        merge_central(sums[OF_SAMPLE:], by_chunk[chunk, OF_SAMPLE:])
    for chunk in range(kept):
        add_columns(parts[chunk], columns)
    count_sqnr(signals, errors, row_bins)
    count_sqnr(columns[0], columns[1], column_bins)
    return told.size > 0 and len(held) > 0  # used once more, they are held until here: threads have their addresses


@compiled
def count_sqnr(signals: Array, errors: Array, bins: Array) -> None:
    """Add a histogram of the SQNR of rows or columns, whose sums of x^2 and e^2 are given."""
    for i in range(signals.size):
        place = sqnr_bin(signals[i], errors[i])
        if place >= 0:
            bins[place] += 1
