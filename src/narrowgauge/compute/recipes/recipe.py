"""A recipe: which format, granularity and scaling each operand of each gemm gets. Frozen data, no arithmetic.

A linear layer is three matrix products, all written "NT": the contracted dimension is the last axis of both
operands.

    fprop   y_MN  = x_MK   · w_NK          contracts K     a = input         b = weight
    dgrad   dx_MK = dy_MN  · wT_KN         contracts N     a = grad_output   b = weight
    wgrad   dw_NK = dyT_NM · xT_KM         contracts M     a = grad_output   b = input

An `Operand` speaks of its tensor in that orientation: "PerRow" in wgrad means one scale per row of dyT, which
is one per column of dy. When both uses of a tensor ask for the same scales, one quantized copy serves both
(`shares`).

Legend: M = tokens, K = input features, N = output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from narrowgauge.compute.quant import (
    CURRENT,
    CURRENT_POW2,
    ROWWISE,
    ROWWISE_POW2,
    Block,
    Granularity,
    PerColumn,
    PerTensor,
    Scaling,
)
from narrowgauge.compute.quant.quantize import SCALE_MIN
from narrowgauge.compute.quant.scaling import FLOAT32_MAX
from narrowgauge.errors import FormatError, RecipeError, nearest
from narrowgauge.formats import CATALOG as FORMATS
from narrowgauge.formats import Format
from narrowgauge.formats import by_name as format_by_name

Role = Literal["input", "weight", "grad_output"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
STATES = ("none", "delayed", "static")
ALGORITHMS = ("max", "most_recent")
INITIALS = ("current", "one")

# Where each role is used: first the copy that the observer sees, then the transposed one.
_USES: dict[Role, tuple[tuple[str, str], tuple[str, str]]] = {
    "input": (("fprop", "a"), ("wgrad", "b")),
    "weight": (("fprop", "b"), ("dgrad", "b")),
    "grad_output": (("dgrad", "a"), ("wgrad", "a")),
}
_POWER_OF_TWO = {CURRENT: CURRENT_POW2, ROWWISE: ROWWISE_POW2}
_PLAIN = {pow2: plain for plain, pow2 in _POWER_OF_TWO.items()}
_WHOLE = ("margin", "history", "refresh_every")  # powers of two, and steps


@dataclass(frozen=True)
class Operand:
    """How one operand of one gemm is quantized: its format, how many scales, by which rule, with what
    headroom.

    `margin` leaves 2^margin of headroom above the amax.
    """

    fmt: Format
    granularity: Granularity
    scaling: Scaling
    margin: int = 0


@dataclass(frozen=True)
class Gemm:
    """One matrix product a·bᵀ. `fast_accum` allows Hopper's short accumulator (about 14 bits).

    `high` says what of it stays in the layer's own dtype: see `recipes.switched`.
    """

    a: Operand
    b: Operand
    fast_accum: bool = False
    high: str = ""


@dataclass(frozen=True)
class Recipe:
    """Everything that a linear layer needs to know about its three gemms.

    `state` says where scales come from: "none" (each tensor's own amax), "delayed" (the amaxes of the last
    `history` steps, by `algorithm`), "static" (a table of `scales` by site, or the first tensor seen; renewed
    every `refresh_every` steps, 0 = never). `initial` is the scale before any history: "current" (the first
    tensor's own amax) or "one". `fake` quantizes every operand but multiplies dequantized values in the
    compute dtype.

    Raises RecipeError when the fields contradict each other.
    """

    name: str
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    state: str = "none"
    history: int = 1024
    algorithm: str = "max"
    initial: str = "current"
    refresh_every: int = 0
    scales: tuple[tuple[str, float], ...] = ()
    fake: bool = False
    source: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        _check_word("state", self.state, STATES)
        _check_word("algorithm", self.algorithm, ALGORITHMS)
        _check_word("initial", self.initial, INITIALS)
        if self.history < 1:
            raise RecipeError(f"recipe {self.name!r}: history is {self.history}; it counts steps, so 1 or more.")
        if self.refresh_every < 0:
            raise RecipeError(
                f"recipe {self.name!r}: refresh_every is {self.refresh_every}; give steps, or 0 for never."
            )
        if self.scales and self.state != "static":
            raise RecipeError(
                f"recipe {self.name!r}: a table of scales needs state='static', found state={self.state!r}."
            )
        for site, scale in self.scales:
            if not SCALE_MIN <= scale <= FLOAT32_MAX:
                raise RecipeError(
                    f"recipe {self.name!r}: the scale of {site!r} is {scale}; expected a number from "
                    f"{SCALE_MIN:.3g} to {FLOAT32_MAX:.3g}."
                )
        for role in ROLES:
            for operand in self.uses(role):
                self._check_operand(role, operand)
            if self.state != "none" and not self.shares(role):
                raise RecipeError(
                    f"recipe {self.name!r}, {role}: state={self.state!r} keeps one scale per tensor, but its two gemms "
                    f"ask for {self.uses(role)[0]} and {self.uses(role)[1]}; make them equal."
                )

    def _check_operand(self, role: str, operand: Operand) -> None:
        where = f"recipe {self.name!r}, {role}"
        if operand.fmt.bits != 8 or not operand.fmt.signed:
            raise RecipeError(f"{where}: {operand.fmt.name} cannot be multiplied as FP8; use E4M3FN or E5M2.")
        if isinstance(operand.granularity, PerColumn):
            raise RecipeError(
                f"{where}: PerColumn varies along the contracted dimension and cannot be factored out of the "
                "product; operands are written with that dimension last, so use PerRow."
            )
        if self.state != "none" and operand.granularity != PerTensor():
            raise RecipeError(
                f"{where}: state={self.state!r} keeps one scale per tensor, found {operand.granularity}; "
                "use PerTensor(), or state='none'."
            )

    def uses(self, role: Role) -> tuple[Operand, Operand]:
        """Return what `role` is quantized to: along its last axis, then transposed for the other gemm."""
        return self._uses[role]

    def shares(self, role: Role) -> bool:
        """Return whether one quantized copy serves both gemms: the same rule, and scales that transpose."""
        return self._shares[role]

    # Asked of every operand of every layer, on the way to a GPU that waits: answered once.
    @cached_property
    def _uses(self) -> dict[Role, tuple[Operand, Operand]]:
        return {
            role: (getattr(getattr(self, gemm_a), side_a), getattr(getattr(self, gemm_b), side_b))
            for role, ((gemm_a, side_a), (gemm_b, side_b)) in _USES.items()
        }

    @cached_property
    def _shares(self) -> dict[Role, bool]:
        return {role: _shared(*uses) for role, uses in self._uses.items()}

    @property
    def keeps_high(self) -> bool:
        """Whether any product, or an operand of one, stays in the layer's own dtype."""
        return any(gemm.high for gemm in (self.fprop, self.dgrad, self.wgrad))

    @property
    def fp8_gemms(self) -> int:
        """How many of the three products are multiplied in FP8."""
        return sum(not (gemm.high or self.fake) for gemm in (self.fprop, self.dgrad, self.wgrad))

    def with_(self, **changes: Any) -> Recipe:
        """Return a copy with some things changed.

        Beside the recipe's own fields: `margin` (every operand), `power_of_two` (round scales to powers of
        two, or not), `fast_accum` (every gemm), and `input`, `weight`, `grad_output` (that role's format, a
        Format or its name). `scales` also takes a mapping from site to scale. Raises RecipeError for a word
        that is none of these.
        """
        result = self
        for word, value in changes.items():
            result = result._change(word, value)
        return result

    def _change(self, word: str, value: Any) -> Recipe:
        if word in _WHOLE and value != int(value):
            raise RecipeError(f"recipe {self.name!r}: {word} is {value}; give a whole number.")
        if word == "margin":
            return self._map_operands(lambda role, operand: replace(operand, margin=int(value)))
        if word == "power_of_two":
            swap = _POWER_OF_TWO if value else _PLAIN
            return self._map_operands(
                lambda role, operand: replace(operand, scaling=swap.get(operand.scaling, operand.scaling))
            )
        if word in ROLES:
            fmt = _as_format(value)
            return self._map_operands(lambda role, operand: replace(operand, fmt=fmt) if role == word else operand)
        if word == "fast_accum":
            gemms = {name: replace(getattr(self, name), fast_accum=bool(value)) for name in ("fprop", "dgrad", "wgrad")}
            return replace(self, **gemms)
        if word == "scales" and isinstance(value, Mapping):
            return replace(self, scales=tuple((str(site), float(scale)) for site, scale in value.items()))
        fields = set(self.__dataclass_fields__)
        if word not in fields:
            words = fields | {"margin", "power_of_two", "fast_accum", *ROLES}
            raise RecipeError(f"a recipe has nothing called {word!r}; {nearest(word, words)}")
        changed: dict[str, Any] = {word: int(value) if word in _WHOLE else value}
        return replace(self, **changed)

    def _map_operands(self, change: Any) -> Recipe:
        gemms = {name: getattr(self, name) for name in ("fprop", "dgrad", "wgrad")}
        for role, uses in _USES.items():
            for gemm, side in uses:
                gemms[gemm] = replace(gemms[gemm], **{side: change(role, getattr(gemms[gemm], side))})
        return replace(self, **gemms)


def fake(recipe: Recipe) -> Recipe:
    """Return `recipe` with its quantization kept and its gemms high: dequantize, multiply in the compute
    dtype.

    Comparing a recipe with its fake separates quantization error from gemm error (accumulation, a scale
    applied to the wrong tensor). The copy is called "fake-" + name.
    """
    if recipe.fake:
        return recipe
    return replace(
        recipe,
        name=f"fake-{recipe.name}",
        fake=True,
        description=f"{recipe.description} Dequantized again, and multiplied in the compute dtype.",
    )


def _check_word(field: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise RecipeError(f"{field} is {value!r}; {nearest(str(value), options)}")


def _shared(plain: Operand, transposed: Operand) -> bool:
    square = isinstance(plain.granularity, Block) and plain.granularity.rows == plain.granularity.cols
    return plain == transposed and (plain.granularity == PerTensor() or square)


def _as_format(value: Any) -> Format:
    if isinstance(value, Format):
        return value
    try:
        return format_by_name(str(value))
    except FormatError:
        raise RecipeError(f"no number format is called {value!r}; {nearest(str(value), FORMATS)}") from None
