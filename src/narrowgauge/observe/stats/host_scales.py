"""The scales of a matrix on the CPU, one per granule, and what is known before anything is compared.

    survey    every run of rows: extremes, mean and M2; of every granule the amax
    scales    a rule's, or given ones    ->    inverses, the limit of flushing, and n, mean, M2, min and max

Legend: M = rows, K = columns, R, C = rows and columns of granules; a granule is number r C + c.
"""

from __future__ import annotations

import numpy as np

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
    scan,
)  # fmt: skip
from narrowgauge.observe.stats.host_rounding import BEYOND, MOST, Steps, flushed_up_to, inv_scale_of, inverse


@compiled
def survey(
    x_at: Number, shift: int, M: int, K: int, stride: int, step: int, tall: int, wide: int, low_of: Array,
    amax_of: Array,
) -> tuple[Number, Number, float, float]:  # fmt: skip
    """Of all of x: bits of the largest and the smallest magnitude, mean and M2.

    Args:
        x_at, shift, stride: as for `host_kernel.operand`.
        step: how many rows are one run.
        tall, wide: rows and columns of a granule.
        low_of: int32 out, bits of the smallest magnitude of every run; infinity's without one.
        amax_of: [R * C] int32 in and out, bits of every granule's largest magnitude; zero before.
    """
    C = -(-K // wide)
    room = np.empty(step * K, np.int32)
    largest, smallest, total, energy = np.int32(0), INFINITY, 0.0, 0.0
    about = mean_of(x_at, shift, min(step, M) * K, room)
    for i in range(0, M, step):
        start, size = i * stride, min(step, M - i) * K
        high, low, s, ss = scan(x_at, shift, start, size, about)
        largest, smallest = max(largest, high), min(smallest, low)
        low_of[i // step] = low
        total += s
        energy += ss
        first = i // tall * C
        if wide == 1 and C > 1:
            bits = bits_of(x_at, shift, start, size, room)
            for j in range(K):
                amax_of[first + j] = max(amax_of[first + j], np.int32(bits[j] & MAGNITUDE))
        elif C > 1:
            for c in range(C):
                part, _ = extremes(x_at, shift, start + c * wide, min(wide, K - c * wide))
                amax_of[first + c] = max(amax_of[first + c], part)
        else:
            amax_of[first] = max(amax_of[first], high)
    n = np.float64(M) * K
    return largest, smallest, about + total / n, max(0.0, energy - total * total / n)


@compiled
def make_scales(amax_of: Array, facts: Array, limits: Array, scale: Array, inv: Array) -> None:
    """A rule's scales, and what they are the inverses of; [R * C] each."""
    for g in range(scale.size):
        inv[g] = inv_scale_of(as_float(amax_of[g]), facts, limits)
        scale[g] = np.float32(1) / inv[g]


@compiled
def survey_scales(
    amax_of: Array, scale: Array, inv: Array, judged: bool, steps: Steps, limits: Array, back: Array, flushed: Array,
    saturates: Array, moments: Array,
) -> bool:  # fmt: skip
    """What counting needs of every granule; False if one of them could stand for something that is not finite.

    Args:
        amax_of, scale, inv: [R * C] bits, float32, float32.
        judged: whether `inv` rounds x; else there are codes.
        back: [R * C] out, what saturation is judged by.
        flushed: [R * C] int32 out, bits of the largest number that becomes zero.
        saturates: [R * C] int8 out, whether anything of a granule lies beyond the format's range.
        moments: [5] out: n, mean, M2, minimum and maximum of the scales.
    """
    total, m2, least, most = 0.0, 0.0, np.inf, -np.inf
    for g in range(scale.size):
        value = np.float64(scale[g])
        if not abs(scale[g]) * limits[MOST] < np.inf:
            return False
        total += value
        least, most = min(least, value), max(most, value)
        back[g] = inverse(scale[g])
        # Rounding is monotone: where the largest is not beyond the limit, none is.
        saturates[g] = as_float(amax_of[g]) * back[g] > limits[BEYOND]
        if judged:
            flushed[g] = flushed_up_to(inv[g], steps)
    mean = total / scale.size
    for g in range(scale.size):
        m2 += (np.float64(scale[g]) - mean) ** 2
    moments[0], moments[1], moments[2], moments[3], moments[4] = np.float64(scale.size), mean, m2, least, most
    return True
