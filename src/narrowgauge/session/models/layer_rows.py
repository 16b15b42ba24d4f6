"""What became of every linear layer of a program's models: rows for the run's table, by the names that sites have.

a model that could not be converted    has rows, too: each says why its layer stays high
layers that two models share           are the first one's, as their sites are
a model whose names another has now    its rows stay, but for those of layers of one name, shape and recipe
a layer that is moved in its model     keeps its row, as its sites their name: around it came an adapter, or one went
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

from torch import nn

from narrowgauge.compute.nn import ConversionReport
from narrowgauge.compute.nn.conversion.report import Row
from narrowgauge.compute.nn.conversion.structure import clean, linear_shape, survey
from narrowgauge.compute.nn.linear import Fp8Linear

MOST_GONE = 4096  # rows of models that are gone: a search may train any number, of any shape


@dataclass
class _Told:
    """A model's report; `name` says what a layer of it is called in the run."""

    model: ref[nn.Module]
    report: ConversionReport
    name: Callable[[str], str]
    added: set[str]  # layers that the model had not at first, as the report names them
    part: str  # of a model that other ranks may have others of (everywhere.py)
    layers: dict[str, ref[nn.Module]]  # by the names of their rows, which they keep wherever they are moved

    def rows(self) -> list[dict[str, Any]]:
        """Ready for JSON."""
        return [
            {
                **row,
                **{key: [self.name(other) for other in row[key]] for key in ("aliases", "shared_with")},
                "name": self.name(row["name"]),
                **({"added": True} if row["name"] in self.added else {}),
                **({"part": self.part} if self.part else {}),
            }
            for row in self.report.to_dict()["rows"]
        ]

    def summary(self) -> dict[str, Any]:
        """The rest of the report."""
        told = {key: value for key, value in self.report.to_dict().items() if key != "rows"}
        return {**told, "never_called": [self.name(row) for row in told["never_called"]]}


class LayerRows:
    """The rows of all models of one program."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}  # by the prefix of the model's names
        self._gone: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._left_names: set[str] = set()  # of layers that are in no model any more, or have a row by another name
        self.notes: list[str] = []

    def put(
        self,
        model: nn.Module,
        prefix: str,
        report: ConversionReport,
        name: Callable[[str], str],
        shared: Set[int],
        part: str = "",
    ) -> None:
        """Take a model's report; `shared` are the ids of modules that are another model's as well, and told there."""
        before = self._told.get(prefix)
        if before is not None and before.model() is not model:
            self._leave(before)
        modules = _linear(model)
        rows = tuple(row for row in report.rows if id(modules.get(row.name)) not in shared)
        layers = {row.name: ref(modules[row.name]) for row in rows if row.name in modules}
        self._told[prefix] = _Told(ref(model), replace(report, rows=rows), name, set(), part, layers)

    def join(
        self, model: nn.Module, prefix: str, later: ConversionReport, name: Callable[[str], str], shared: Set[int]
    ) -> tuple[Row, ...]:
        """Take what became of layers that the model got since; the rows that say something new."""
        before = self._told.get(prefix)
        if before is None or before.model() is not model:
            self.put(model, prefix, later, name, shared)
            known, told = set[tuple[str, bool]](), self._told[prefix]
            rows = told.report.rows
        else:
            known, told = {(row.name, row.recipe is None) for row in before.report.rows}, before
            here = _linear(model)
            rows = tuple(row for row in later.rows if id(here.get(row.name)) not in shared)
            stay = _staying(told.layers, here, {id(here.get(row.name)) for row in rows})
            left = {row.name for row in before.report.rows} - stay
            self._left_names |= set(map(told.name, left)) if len(self._left_names) < MOST_GONE else set()
            told.report = told.report.within(stay).joined(replace(later, rows=rows))
            told.layers = {name: at for name, at in told.layers.items() if name in stay}
            told.layers |= {row.name: ref(here[row.name]) for row in rows if row.name in here}
            told.name = name
        new = tuple(row for row in rows if row.recipe is not None or (row.name, True) not in known)
        told.added.update(row.name for row in new)
        return new

    def facts(self) -> dict[str, Any]:
        """For the run's metadata."""
        rows = [row for told in self._told.values() for row in told.rows()]
        here = set(map(_key, rows))
        return {
            "conversion": [*(row for key, row in self._gone.items() if key not in here), *rows],
            "conversion_summary": [told.summary() for told in self._told.values()],
            **({"linear_gone": gone} if (gone := sorted(self._left_names - {row["name"] for row in rows})) else {}),
        }

    def _leave(self, told: _Told) -> None:
        """Keep what a model that is gone was told to be, and nothing of its layers."""
        for row in told.rows():
            if len(self._gone) < MOST_GONE or _key(row) in self._gone:
                self._gone[_key(row)] = row
            elif not self.notes:
                self.notes.append(f"Of layers of models that are gone {MOST_GONE} are told; there were more.")


def stayed(model: nn.Module, recipe: str, refusal: str) -> ConversionReport:
    """The report of a model of which nothing could be converted, for one reason."""
    why = refusal.partition(";")[0]
    rows = (
        Row(layer.name, layer.shape, None, why, aliases=layer.aliases)
        for layer in survey(model)
        if not isinstance(layer.module, Fp8Linear)
    )
    return ConversionReport(type(model).__name__, recipe, tuple(rows))


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    """The model's linear layers, by all names that its report may have for them."""
    modules = model.named_modules(remove_duplicate=False)
    return {clean(name): module for name, module in modules if linear_shape(module) is not None}


def _staying(layers: Mapping[str, ref[nn.Module]], here: Mapping[str, nn.Module], anew: Set[int]) -> set[str]:
    """The names of rows whose layers the model still has: by another name, too, unless it has a row `anew` by that.

    Where a copy of a layer has its name, the row speaks of the copy.
    """
    present = {id(module) for module in here.values()}
    known = {name: id(module) for name, at in layers.items() if (module := at()) is not None}
    told = set(known.values())
    return {
        name
        for name in layers
        if (known.get(name) in present and known[name] not in anew)
        or (name in here and (known.get(name) == id(here[name]) or id(here[name]) not in told))
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["name"], tuple(row["shape"]), row["recipe"]
