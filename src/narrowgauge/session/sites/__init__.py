"""How other people's layers are seen: one file per kind of layer, none of which imports the package it knows."""

from narrowgauge.session.sites.census import Census
from narrowgauge.session.sites.known import KINDS, kind_of
from narrowgauge.session.sites.part import Kind, Own, Part
from narrowgauge.session.sites.products import Products

__all__ = ["KINDS", "Census", "Kind", "Own", "Part", "Products", "kind_of"]
