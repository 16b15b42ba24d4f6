"""Recipes: which format, granularity and scaling each operand of each gemm gets."""

from narrowgauge.compute.recipes.catalog import (
    BLOCKWISE,
    CATALOG,
    CURRENT,
    DELAYED,
    MXFP8,
    MXFP8_OCP,
    ROWWISE,
    STATIC,
    by_name,
)
from narrowgauge.compute.recipes.recipe import ROLES, Gemm, Operand, Recipe, fake

__all__ = [
    "BLOCKWISE",
    "CATALOG",
    "CURRENT",
    "DELAYED",
    "MXFP8",
    "MXFP8_OCP",
    "ROLES",
    "ROWWISE",
    "STATIC",
    "Gemm",
    "Operand",
    "Recipe",
    "by_name",
    "fake",
]
