"""Where FP8 pays: measured speed-ups over BF16 by shape and recipe, one map per kind of GPU.

    speed-up(M, K, N) = t_bf16 / t_fp8      of one layer's step: three products, and in FP8 the quantizing before them

A map is what `narrowgauge bench gemm --sweep --out FILE` writes, on a grid of M, K and N. In between, the logarithm of
the speed-up is interpolated linearly in log2 M, log2 K and log2 N; outside, the nearest edge holds. Maps that were
measured for the project lie in `speed_maps/` beside this file.

A layer is judged alone: fusing the quantization with what produces the tensor, or reusing a weight's codes
over microbatches, makes FP8 better than its map.

Legend: M = tokens, K = input features, N = output features.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch

from narrowgauge.compute.recipes import Recipe
from narrowgauge.errors import ConversionError

TOKENS = 8192  # M where nobody says it: what a device sees at once in many training runs
FOLDER = Path(__file__).parent / "speed_maps"
HOW = "`narrowgauge bench gemm --sweep --out FILE` draws one, which skip_slow=SpeedMap.read(FILE) takes."
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class SpeedMap:
    """Speed-ups over BF16 on one kind of GPU: `points[recipe][M, K, N]` on a full grid; `date` of the measurement."""

    gpu: str
    points: Mapping[str, Mapping[Shape, float]]
    date: str = ""

    @classmethod
    def read(cls, path: Path | str) -> SpeedMap:
        """Read what `narrowgauge bench gemm --sweep --out` wrote.

        Raises ConversionError if the file cannot be read, is something else, or has holes in its grid.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            points: dict[str, dict[Shape, float]] = {}
            for row in data["rows"]:
                points.setdefault(row["recipe"], {})[row["M"], row["K"], row["N"]] = float(row["step"])
            found = cls(str(data["hardware"]), points, str(data.get("date", "")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConversionError(
                f"{path} is no speed map ({type(error).__name__}: {error}); expected what "
                "`narrowgauge bench gemm --sweep --out FILE` writes."
            ) from error
        found.check()
        return found

    def check(self) -> None:
        """Raise ConversionError unless there is a point, every grid is full, and every speed-up is above 0."""
        if not self.points:
            raise ConversionError("a speed map without a point says nothing; measure at least one shape.")
        for recipe, grid in self.points.items():
            M, K, N = self._axes(recipe)
            missing = [shape for shape in product(M, K, N) if shape not in grid]
            wrong = [shape for shape, value in grid.items() if not (value > 0 and math.isfinite(value))]
            if missing or wrong:
                raise ConversionError(
                    f"the speed map of {self.gpu} is incomplete: {recipe} at M, K, N = {(missing + wrong)[0]} "
                    f"{'is missing' if missing else 'is no speed-up'}."
                )

    def speedup(self, recipe: str, M: int, K: int, N: int) -> float | None:
        """The speed-up over BF16 of one layer's step, None for a recipe that was not measured.

        >>> SpeedMap("x", {"current": {(16, 16, 16): 0.5, (64, 16, 16): 2.0}}).speedup("current", 32, 16, 16)
        1.0
        """
        if recipe not in self.points:
            return None
        grid, total = self.points[recipe], 0.0
        sides = [_between(axis, value) for axis, value in zip(self._axes(recipe), (M, K, N), strict=True)]
        for (m, m_share), (k, k_share), (n, n_share) in product(*sides):
            total += m_share * k_share * n_share * math.log(grid[m, k, n])
        return math.exp(total)

    def _axes(self, recipe: str) -> tuple[list[int], list[int], list[int]]:
        M, K, N = (sorted(set(axis)) for axis in zip(*self.points[recipe], strict=True))
        return M, K, N


def _between(axis: Sequence[int], value: int) -> tuple[tuple[int, float], ...]:
    """The grid's neighbours of `value` and the weight of each, which add up to 1; the edge itself outside."""
    if value <= axis[0]:
        return ((axis[0], 1.0),)
    if value >= axis[-1]:
        return ((axis[-1], 1.0),)
    above = bisect_right(axis, value)
    low, high = axis[above - 1], axis[above]
    share = math.log2(value / low) / math.log2(high / low)
    return ((low, 1.0 - share), (high, share))


@cache
def shipped() -> Mapping[str, SpeedMap]:
    """The maps that come with the package, by the name that torch gives the GPU."""
    maps = [SpeedMap.read(path) for path in sorted(FOLDER.glob("*.json"))]
    return {found.gpu: found for found in maps}


class SlowLayers:
    """Answers for `convert(skip_slow=...)` which layers FP8 would slow down, and keeps what it could not judge.

    Args:
        given: True for the map that comes with the package for the layer's GPU, or a map to use wherever it is.
        tokens: M, the rows of a layer's input; None for 8192.

    Raises ConversionError for fewer than 1 token.
    """

    def __init__(self, given: bool | SpeedMap, tokens: int | None = None) -> None:
        if tokens is not None and tokens < 1:
            raise ConversionError(f"tokens={tokens}: it counts the rows of a layer's input, so 1 or more.")
        self._given = given if isinstance(given, SpeedMap) else None
        self._tokens, self._assumed = tokens or TOKENS, tokens is None
        self._notes: list[str] = []

    def reason(self, recipe: Recipe, N: int, K: int, device: torch.device) -> str | None:
        """Why a layer with weight [N, K] should stay high for its speed; None if FP8 is faster, or nobody knows."""
        found = self._map(device)
        if found is None:
            return None
        value = found.speedup(recipe.name, self._tokens, K, N)
        if value is None:
            self._note(
                f"the map of {found.gpu} has no recipe {recipe.name!r} (it has {', '.join(sorted(found.points))}), "
                "so no layer was kept high for its speed."
            )
            return None
        source = f"{found.gpu}, {found.date}" if found.date else found.gpu
        assumed = "assumed; tokens= says otherwise" if self._assumed else "as tokens= says"
        self._note(f"layers slower than BF16 stay high, by the map of {source}, at {self._tokens} tokens ({assumed}).")
        if value >= 1.0:
            return None
        return f"skip_slow: {recipe.name} is {value:.2f}x BF16 at M={self._tokens}, K={K}, N={N}"

    def notes(self) -> tuple[str, ...]:
        """Lines for the report: which map judged, or why none did."""
        return tuple(f"skip_slow: {note}" for note in self._notes)

    def _map(self, device: torch.device) -> SpeedMap | None:
        if self._given is not None:
            return self._given
        if device.type != "cuda":
            self._note(
                f"the model is on {device.type!r}, where FP8 is emulated and no map holds, so no layer was kept high "
                "for its speed. Convert it on the GPU, or pass the GPU's SpeedMap."
            )
            return None
        name = torch.cuda.get_device_name(device)
        found = shipped().get(name)
        if found is None:
            self._note(f"there is no map of {name}, so no layer was kept high for its speed. {HOW}")
        return found

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
