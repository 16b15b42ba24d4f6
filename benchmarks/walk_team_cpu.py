"""The CPU's walk over a tensor between two products of torch's: by one thread, by all that compute, and by half.

    alone    one thread counts, while torch's others wait
    team     torch's threads share the pass over all of it
    half     half of them do, and torch's next product has to have its threads made anew

Told are microseconds of the walk, and of it with a product before and one behind; medians, in turn.

    python -m benchmarks.walk_team_cpu [--repeats 60]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.record import record
from torch import Tensor

from narrowgauge.compute.recipes import by_name
from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats import host, team
from narrowgauge.observe.stats.moments import strides

SHAPES = ((256, 128), (512, 512), (2048, 1024), (8192, 1024))
RECIPES = ("current", "blockwise")
WARM = 3


def walker(x: Tensor, recipe: str, shared: bool) -> Callable[[], bool]:
    """What counts x, by torch's threads or by one."""
    with patch.object(team, "address", team.address if shared else lambda: 0):
        known = host.as_before(x, by_name(recipe).uses("input")[0], strides(*x.shape))
    assert known is not None

    def walk() -> bool:
        sums = np.zeros((2, known.columns))
        if known.shared:
            team.settle()
        return known.walk(x.data_ptr(), 3, known.asked, known.limits, MOMENTS.empty(), sums)

    return walk


def times(x: Tensor, recipe: str, repeats: int) -> dict[str, float]:
    """Medians of each way."""
    threads, weight = torch.get_num_threads(), torch.randn(x.shape[1], x.shape[1])
    alone, shared = (walker(x, recipe, team) for team in (False, True))
    ways = {"alone": (alone, threads), "team": (shared, threads), "half": (shared, max(1, threads // 2))}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats + WARM):
        for name, (walk, count) in ways.items():
            began = time.perf_counter()
            torch.mm(x, weight)
            torch.set_num_threads(count)
            between = time.perf_counter()
            walk()
            after = time.perf_counter()
            torch.set_num_threads(threads)
            torch.mm(x, weight)
            taken[name].append((after - between, time.perf_counter() - began))
    return {
        f"{name}{what}": round(1e6 * statistics.median(each[at] for each in found[WARM:]), 1)
        for name, found in taken.items()
        for at, what in enumerate((" us", " in all"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    host.wait()
    rows: list[dict[str, Any]] = [
        {"recipe": recipe, "M": M, "K": K, **times(torch.randn(M, K), recipe, args.repeats)}
        for recipe in RECIPES
        for M, K in SHAPES
    ]
    record("walk_team", {"threads": torch.get_num_threads(), "repeats": args.repeats}, rows)


if __name__ == "__main__":
    main()
