"""What stands where in a rank's table of a step: one vector of float64, the same length on all ranks.

    [ operands S x W | results R x H | scalars K x (1 + N) | nothing ]

A row of scalars is its step and its N numbers, NaN for what the step has not. Ranks may have different sites (pipeline
stages, experts); who merges knows every rank's layout, and unites them by name, which `Stages` tells apart. A site has
a further row for each further recipe that looked at it (`what_if`).

Legend: S, R = operand and result sites, W, H = packed and head width, K = rows of scalars, N = names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from narrowgauge.metrics import MOMENTS
from narrowgauge.metrics.stages import Staged

BY = "\t"  # behind the recipe; no module has it in its name


def address(by: str, site: str) -> str:
    """The name of a site's row by a further recipe; its own row has the site's.

    >>> address("", "0:input"), address("rowwise", "0:input")
    ('0:input', 'rowwise\\t0:input')
    """
    return f"{by}{BY}{site}" if by else site


@dataclass(frozen=True)
class Layout:
    """One rank's.

    Args:
        operands, results: sites, in the order of their rows.
        scalars: names, in the order of their columns.
        rows: of scalars.
        copies: per operand site, the lowest rank that holds the same values; null where nobody else is known to.
        meshes: per operand site, the lowest rank of the mesh that its weight lies on; null where it says of none.
        stages: per operand site and then per result, the stage of a pipeline that it is in; empty if none is in one.
        by: per operand site, the further recipe whose row it is, "" of the run's own; empty if all are.
        models: how many there were so far: another one may have the sites' names from here on.
        mesh: the lowest rank of the mesh that what is trained lies on, null without one: ranks of one mesh hold parts
            of the same norms.
        began: a name for the weights that its models began with and which of them it trains: ranks with the same one
            are replicas. Empty if nobody knows.
    """

    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    rows: int = 0
    copies: tuple[int | None, ...] = ()
    meshes: tuple[int | None, ...] = ()
    stages: tuple[int | None, ...] = ()
    by: tuple[str, ...] = ()
    models: int = 0
    mesh: int | None = None
    began: str = ""

    @cached_property
    def text(self) -> str:
        """As it travels."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The inverse of `text`."""
        sent: dict[str, Any] = json.loads(text)
        found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in sent.items()}
        return cls(**found)

    @cached_property
    def digest(self) -> str:
        """Its name: equal layouts have equal ones."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def sites(self) -> str:
        """A name for its sites alone: ranks that run the same part of a model have equal ones."""
        return replace(self, scalars=(), rows=0, copies=(), meshes=(), models=0, mesh=None, began="").digest

    @property
    def staged_operands(self) -> list[Staged]:
        """Its operand sites, with their stages."""
        stages = self.stages[: len(self.operands)] or (None,) * len(self.operands)
        return list(zip(self.operands, stages, strict=True))

    @property
    def staged_results(self) -> list[Staged]:
        """Its result sites, with their stages."""
        stages = self.stages[len(self.operands) :] or (None,) * len(self.results)
        return list(zip(self.results, stages, strict=True))

    @property
    def cuts(self) -> tuple[int, int, int]:
        """Where results, scalars and nothing begin; the last is the size of the table."""
        results = len(self.operands) * MOMENTS.width
        scalars = results + len(self.results) * MOMENTS.head_width
        return results, scalars, scalars + self.rows * (1 + len(self.scalars))


def families(layouts: Sequence[Layout]) -> list[str]:
    """What each rank's family is called: one of those that multiply at some site that others of it multiply at, too.

    Ranks with experts of their own are of one, by all that is no expert; stages of a pipeline, which feed each other,
    are not.
    """
    kinds = {one.sites: one for one in layouts}
    found: list[tuple[set[Staged], list[str]]] = []
    for kind, one in kinds.items():
        sites, names = set(one.staged_operands), [kind]
        apart = []
        for family in found:
            if sites.isdisjoint(family[0]):
                apart.append(family)
            else:
                sites, names = sites | family[0], family[1] + names
        found = [*apart, (sites, names)]
    called = {kind: names[0] for _, names in found for kind in names}
    return [called[one.sites] for one in layouts]
