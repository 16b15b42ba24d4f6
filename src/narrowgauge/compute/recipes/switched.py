"""A recipe of which single products or operands stay high: frozen data derived from frozen data.

high   "ab"     neither operand is quantized: the product is the unconverted layer's, bit by bit
       "a" "b"  this operand is not; the other is quantized, and multiplied as what its codes stand for
       "gemm"   both are quantized, and what their codes stand for is multiplied in the layer's own dtype
       ""       FP8
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from narrowgauge.compute.recipes.recipe import Recipe
from narrowgauge.errors import RecipeError, nearest

OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
KEEP = ("high", "bf16_gemm")


def switched(
    recipe: Recipe,
    gemms: Collection[str] = tuple(OPERANDS),
    roles: Collection[str] = (),
    keep: str = "high",
) -> Recipe:
    """Return `recipe` with something kept high, beside what it keeps high already.

    Args:
        recipe: what else is done.
        gemms: of which products: "fprop", "dgrad", "wgrad".
        roles: which of their operands; both if empty.
        keep: "high": not quantized; "bf16_gemm": quantized, but multiplied in the layer's own dtype.

    Raises:
        RecipeError: a word that is none, roles beside "bf16_gemm", or no operand among these products.

    >>> from narrowgauge.compute.recipes import CURRENT
    >>> switched(CURRENT, ["wgrad"]).wgrad.high
    'ab'
    """
    check(gemms, roles, keep)
    changed = {}
    for name in gemms:
        gemm = getattr(recipe, name)
        sides = set(gemm.high) if gemm.high != "gemm" else set()
        if keep == "high":
            sides |= {side for side, role in zip("ab", OPERANDS[name], strict=True) if not roles or role in roles}
        # An operand that stays high is multiplied in the layer's own dtype anyway.
        word = "".join(sorted(sides)) or ("gemm" if keep == "bf16_gemm" else gemm.high)
        changed[name] = replace(gemm, high=word)
    return replace(recipe, **changed)


def check(gemms: Collection[str], roles: Collection[str], keep: str) -> None:
    """Raise RecipeError for words that `switched` does not take."""
    for kind, words, known in (
        ("gemm", gemms, tuple(OPERANDS)),
        ("operand", roles, ("input", "weight", "grad_output")),
        ("keep", [keep], KEEP),
    ):
        for word in words:
            if word not in known:
                raise RecipeError(f"there is no {kind} {word!r}; {nearest(str(word), known)}")
    if roles and keep == "bf16_gemm":
        raise RecipeError(f"keep='bf16_gemm' quantizes both operands; leave roles={list(roles)} out.")
    for role in roles:
        if not any(role in OPERANDS[name] for name in gemms):
            theirs = " and ".join(dict.fromkeys(word for name in gemms for word in OPERANDS[name]))
            raise RecipeError(f"{role!r} is no operand of {' or '.join(gemms)}; its operands are {theirs}.")


def described(recipe: Recipe) -> str:
    """What stays high, in words; "" if nothing does.

    >>> from narrowgauge.compute.recipes import CURRENT
    >>> described(switched(switched(CURRENT, ["wgrad"]), roles=["weight"]))
    'fprop weight high, dgrad weight high, wgrad high'
    """
    words = []
    for name, operands in OPERANDS.items():
        high = getattr(recipe, name).high
        if high == "gemm":
            words.append(f"{name} multiplied high")
        elif high == "ab":
            words.append(f"{name} high")
        elif high:
            words.append(f"{name} {operands['ab'.index(high)]} high")
    return ", ".join(words)


def quantizes(recipe: Recipe, gemm: str, role: str) -> bool:
    """Whether an operand of a product is quantized.

    >>> from narrowgauge.compute.recipes import CURRENT
    >>> quantizes(switched(CURRENT, roles=["weight"]), "fprop", "weight")
    False
    """
    high = getattr(recipe, gemm).high
    return bool(high == "gemm" or "ab"[OPERANDS[gemm].index(role)] not in high)
