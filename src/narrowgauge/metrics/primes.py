"""Strides for shares of rows and elements: primes, for heads and positions repeat after powers of two.

A stride that such a number divides would meet but one of them, in every step.
"""

from __future__ import annotations

import math
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
