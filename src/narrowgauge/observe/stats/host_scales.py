"""The scales of a matrix on the CPU, one per granule, and what is known before anything is compared.

    survey    every run of rows: extremes, mean and M2; of every granule the amax
    scales    a rule's, or given ones    ->    inverses, the limit of flushing, and n, mean, M2, min and max

Legend: M = rows, K = columns, R, C = rows and columns of granules; a granule is number r C + c.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.host_bits import (
    INFINITY,
    MAGNITUDE,
    Array,
    Number,
    as_float,
    bits_of,
    compiled,
    extremes,
    mean_of,
    pointer,
    scan,
    widely,
)  # fmt: skip
from narrowgauge.observe.stats.host_rounding import BEYOND, MOST, Steps, flushed_up_to, inv_scale_of, inverse
from narrowgauge.observe.stats.host_team import by_all, mine, whom

# What is known of a granule: bits of its amax, its scale, what rounds its numbers, what saturation is judged by and the
# largest number that becomes zero; whether anything lies beyond the format.
GRANULE = ("amax", "scale", "inv", "back", "flushed", "saturates")
AMAX, SCALE, INV, BACK, FLUSHED, SATURATES = range(len(GRANULE))
TOLD = 17  # numbers that say what is surveyed: arguments of `survey`, and where what it finds is left


@compiled
def survey(
    x_at: Number, shift: int, M: int, K: int, stride: int, step: int, tall: int, wide: int, low_of: Array,
    amax_of: Array, team_at: Number,
) -> tuple[Number, Number, float, float]:  # fmt: skip
    """Of all of x: bits of the largest and the smallest magnitude, mean and M2.

    To the last bit the same, however many threads share the runs.

    Args:
        x_at, shift, stride: as for `host_kernel.operand`.
        step: how many rows are one run.
        tall, wide: rows and columns of a granule.
        low_of: int32 out, bits of the smallest magnitude of every run; infinity's without one.
        amax_of: [R * C] int32 in and out, bits of every granule's largest magnitude; zero before.
        team_at: address of a TEAM, 0 without one.
    """
    runs, unit = low_of.size, step if amax_of.size == 1 else tall  # what one thread takes: no granule is of two
    about, high_of, sums, room = (
        np.empty(1),
        np.empty(runs, np.int32),
        np.empty((2, runs)),
        np.empty(step * K, np.int32),
    )
    about[0] = mean_of(x_at, shift, min(step, M) * K, room)
    told = np.empty(TOLD, np.int64)
    told[0], told[1], told[2], told[3], told[4], told[5] = x_at, shift, M, K, stride, step
    told[6], told[7], told[8], told[9] = tall, wide, unit, amax_of.size
    told[11], told[12] = np.int64(low_of.ctypes.data), np.int64(high_of.ctypes.data)
    told[13], told[14] = np.int64(sums.ctypes.data), np.int64(about.ctypes.data)
    told[15], told[16] = np.int64(amax_of.ctypes.data), np.int64(room.ctypes.data)
    run, threads = whom(team_at, M * K if unit < M else 0)
    told[10] = team_at if run else 0
    _by_all(run, np.int64(told.ctypes.data), threads)
    largest, smallest, total, energy = np.int32(0), INFINITY, 0.0, 0.0
    for i in range(runs):
        largest, smallest = max(largest, high_of[i]), min(smallest, low_of[i])
        total += sums[0, i]
        energy += sums[1, i]
    if amax_of.size == 1:
        amax_of[0] = largest
    n = np.float64(told[2]) * told[3] if room.size else 0.0  # both are held until here: threads have their addresses
    return largest, smallest, about[0] + total / n, max(0.0, energy - total * total / n)


@compiled
def _mine(told_at: Number) -> None:
    told = carray(pointer(told_at), (TOLD,), np.int64)
    first, last = mine(told[10], -(-told[2] // told[8]))
    _runs(told, first * told[8], min(told[2], last * told[8]))


_by_all: Any = by_all(_mine)


@compiled
def _runs(told: Array, first: int, last: int) -> None:
    """The runs of these rows: what is found of each is left at its place, granules' amaxes at theirs."""
    widely()
    x_at, shift, M, K, stride, step = told[0], told[1], told[2], told[3], told[4], told[5]
    tall, wide, granules, runs = told[6], told[7], told[9], -(-M // step)
    C, about = -(-K // wide), carray(pointer(told[14]), (1,), np.float64)[0]
    low_of, high_of = (carray(pointer(told[11]), (runs,), np.int32), carray(pointer(told[12]), (runs,), np.int32))
    sums = carray(pointer(told[13]), (2, runs), np.float64)
    amax_of = carray(pointer(told[15]), (granules,), np.int32)
    room = carray(pointer(told[16]), (step * K,), np.int32)  # for columns, whose runs are not shared
    for i in range(first, last, step):
        run, start, size = i // step, i * stride, min(step, M - i) * K
        high, low, total, energy = scan(x_at, shift, start, size, about)
        high_of[run], low_of[run], sums[0, run], sums[1, run] = high, low, total, energy
        at = i // tall * C
        if wide == 1 and C > 1:
            bits = bits_of(x_at, shift, start, size, room)
            for j in range(K):
                amax_of[at + j] = max(amax_of[at + j], np.int32(bits[j] & MAGNITUDE))
        elif C > 1:
            for c in range(C):
                part, _ = extremes(x_at, shift, start + c * wide, min(wide, K - c * wide))
                amax_of[at + c] = max(amax_of[at + c], part)
        elif granules > 1:
            amax_of[at] = max(amax_of[at], high)


@compiled
def make_scales(amax_of: Array, facts: Array, limits: Array, scale: Array, inv: Array) -> None:
    """A rule's scales, and what they are the inverses of; [R * C] each."""
    widely()
    for g in range(scale.size):
        inv[g] = inv_scale_of(as_float(amax_of[g]), facts, limits)
        scale[g] = np.float32(1) / inv[g]


@compiled
def survey_scales(of_granules: Array, judged: bool, steps: Steps, limits: Array, moments: Array) -> bool:
    """What counting needs of every granule; False if one of them could stand for something that is not finite.

    Args:
        of_granules: [6, R * C] int32, GRANULE; what comes behind `inv` is filled.
        judged: whether x is rounded; else there are codes.
        moments: [5] out: n, mean, M2, minimum and maximum of the scales.
    """
    scale, inv = of_granules[SCALE].view(np.float32), of_granules[INV].view(np.float32)
    back = of_granules[BACK].view(np.float32)
    total, m2, least, most = 0.0, 0.0, np.inf, -np.inf
    for g in range(scale.size):
        value = np.float64(scale[g])
        if not abs(scale[g]) * limits[MOST] < np.inf:
            return False
        total += value
        least, most = min(least, value), max(most, value)
        back[g] = inverse(scale[g])
        # Rounding is monotone: where the largest is not beyond the limit, none is.
        of_granules[SATURATES, g] = as_float(of_granules[AMAX, g]) * back[g] > limits[BEYOND]
        if judged:
            of_granules[FLUSHED, g] = flushed_up_to(inv[g], steps)
    mean = total / scale.size
    for g in range(scale.size):
        m2 += (np.float64(scale[g]) - mean) ** 2
    moments[0], moments[1], moments[2], moments[3], moments[4] = np.float64(scale.size), mean, m2, least, most
    return True
