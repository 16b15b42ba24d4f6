"""Strides for shares of rows and elements: primes, for heads and positions repeat after powers of two.

A stride that such a number divides would meet but one of them, in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache


@cache
def last_prime(most: int) -> int:
    """The largest prime up to `most`; 1 if there is none.

    >>> last_prime(32), last_prime(2), last_prime(0)
    (31, 2, 1)
    """
    while any(most % d == 0 for d in range(2, math.isqrt(max(most, 1)) + 1)):
        most -= 1
    return max(1, most)


@cache
def next_prime(least: int) -> int:
    """The smallest prime from `least` on; 1 for 1.

    >>> next_prime(1), next_prime(8)
    (1, 11)
    """
    while any(least % d == 0 for d in range(2, math.isqrt(least) + 1)):
        least += 1
    return least


def stride_over(widths: Iterable[int], least: int, run: int = 1) -> int:
    """The smallest prime from `least` on, 1 for 1, such that of rows of these widths, one behind the other, every
    stride-th run of so many elements meets all columns in the end, and not always the same.

    >>> stride_over([4096, 14336], 2), stride_over([1000], 5, run=16)
    (3, 7)
    """
    stride, widths = next_prime(least), set(widths)
    while stride > 1 and any(math.gcd(run * stride, width) > run for width in widths):
        stride = next_prime(stride + 1)
    return stride
