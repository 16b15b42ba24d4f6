"""What becomes of the layers of a program's models, as the plan says.

convert     to FP8; a comparison's baseline does it in a rehearsal, and back again
added       the same for what the program adds to a model, or exchanges in it, once it trains
hear        those that the program itself has converted
switch      products that shall stay high, of layers that the program has in FP8

What became of each layer is kept in layer_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from narrowgauge.compute.nn import ConversionReport, convert, revert
from narrowgauge.compute.nn.conversion.structure import clean
from narrowgauge.compute.nn.conversion.switches import Switch
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.recipes import by_name
from narrowgauge.errors import ConversionError, RecipeError
from narrowgauge.metrics.site import covers_name
from narrowgauge.session.machine import native_fp8
from narrowgauge.session.models.layer_rows import LayerRows, stayed
from narrowgauge.session.plan import Plan
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.sites.part import named
from narrowgauge.session.switches import foreign
from narrowgauge.session.tensors.sharded import lowest

COPIED = (
    "A model came with layers in FP8, as a copy of one that was converted has them, or a new one made of its layers: "
    "they train so and are recorded; the table of conversions has those of the first."
)


class Conversions:
    """The converted layers of all models of one program, and those that could not be."""

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self._plan, self._recorder = plan, recorder
        self._rows = LayerRows()
        self._any = False  # something was converted
        self._refusals: list[ConversionError | RecipeError] = []
        self._ended = False  # a refusal ended the program, and is its error
        self._switched: dict[str, str] = {}  # layers that the program has in FP8, and which products stay high
        self._asked = False  # the settings name some
        self._kept: list[foreign.Kept] = []
        self._met: set[int] = set()  # of the tables of switches those that met a layer in FP8
        self._in_parts = False  # other ranks may have other layers of a model
        self._idle: list[str] = []  # switches that did nothing
        self._layers: WeakValueDictionary[str, LayerState] = WeakValueDictionary()  # converted ones, by their names
        self.observed = False  # layers that are converted are looked at
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        """What is to be told of models and layers that were converted, or could not be."""
        return [*self._notes, *self._rows.notes]

    def convert(
        self,
        model: nn.Module,
        prefix: str,
        shared: Set[int],
        *,
        whole: Callable[[], bool],
        part: Callable[[], str],
    ) -> None:
        """Convert a model whose layers' names begin with `prefix`, or hear the layers that the program converted.

        Raises RecipeError, or ConversionError when no other model is converted or left.

        Args:
            model, prefix: which.
            shared: the ids of its parts that are parts of another one, too.
            whole: says whether with it all is seen that is trained, here and on other ranks.
            part: says which part of a model it is, if other ranks may have others; "" if none.
        """
        if self._plan.recipe is None and not self._plan.rehearse:
            self._hear(model, prefix)
            return
        which = part() if self._plan.recipe is not None else ""  # before a conversion makes anything of its weights
        self._in_parts = self._in_parts or bool(which)
        if shared and not any(_is_plain(m) and id(m) not in shared for m in model.modules()):
            return  # a wrapper, say
        if self._any and self._is_copy(model, shared):
            self._notes += [] if COPIED in self._notes else [COPIED]
            self._observe(model, prefix)
            return
        try:
            report = self._converted(model, beside=bool(shared))
        except RecipeError as refusal:  # a backend that cannot: no other model of this program will be converted
            self._refusals.append(refusal)
            self._ended = True
            raise
        except ConversionError as refusal:
            self._refusals.append(refusal)
            if not self._any and whole():
                self._ended = True
                raise
            if self._plan.recipe is None:
                return
            but = ", but for what it shares with another" if shared else ""
            self._notes.append(f"One of the script's models stays in the baseline's precision{but}: {refusal}")
            report = self._stayed(model, refusal, beside=bool(shared))
        else:
            self._any = True
        if self._plan.recipe is None:
            return
        self._tell(report)
        self._rows.put(model, prefix, report, self._recorder.under(prefix, model).name, shared, which)
        if report.converted:
            self._observe(model, prefix)

    def _tell(self, report: ConversionReport) -> None:
        """What no row of a layer says (evaluations that never call it): whoever watches does not print the report."""
        if report.converted:
            told = (note.removeprefix("note: ") for note in report.notes)
            self._notes += [note for note in told if note not in self._notes]

    def _is_copy(self, model: nn.Module, shared: Set[int]) -> bool:
        """Whether layers of its own came in FP8, all of them as the command asks."""
        own = [m for m in model.modules() if isinstance(m, Fp8Linear) and id(m) not in shared]
        recipe = self._plan.recipe
        return recipe is not None and bool(own) and all(m._fp8.recipe == by_name(recipe) for m in own)

    def _stayed(self, model: nn.Module, refusal: ConversionError, *, beside: bool) -> ConversionReport:
        """Why each layer of a refused model stays high."""
        try:
            return self._converted(model, beside=beside, strict=False)
        except ConversionError:  # not for what its layers are: something that was asked does not fit it
            return stayed(model, str(self._plan.recipe), str(refusal))

    def added(self, model: nn.Module, prefix: str, left_alone: list[str], shared: Set[int]) -> str:
        """Convert, or hear, what the program has added to a model since; in words what was done, "" if nothing.

        `left_alone` are parts by name that do not train, and stay as they are; `shared` is as above.
        """
        if self._plan.recipe is None:
            self._hear(model, prefix)
            return ""
        alone = [clean(name) for name in left_alone]
        try:
            report = self._converted(model, beside=True, strict=False, skip=alone)
        except (ConversionError, RecipeError) as refusal:
            note = f"What the script added to its model stays in the baseline's precision: {refusal}"
            self._notes += [note] if note not in self._notes else []
            return ""
        self._any |= bool(report.converted)
        self._tell(report)
        rows = tuple(row for row in report.rows if not any(covers_name(name, row.name) for name in alone))
        name = self._recorder.under(prefix, model).name
        new = self._rows.join(model, prefix, replace(report, rows=rows), name, shared)
        self._observe(model, prefix)
        return "; ".join(
            f"{name(row.name)} was converted to {row.recipe}"
            if row.recipe
            else f"{name(row.name)} stays high ({row.reason})"
            for row in new
        )

    def switch(self, model: nn.Module, called: nn.Module, prefix: str) -> None:
        """Have products of layers stay high that the program has in FP8, where the settings name them."""
        high = self._plan.convert.get("high", ())
        if high and self._plan.compiling:  # a comparison's baseline is the program as it is written
            kept = foreign.switch(model, high, called, converting=self._plan.recipe is not None)
            self._switched |= {named(prefix, name): what for name, what in kept.told.items()}
            self._met |= kept.met
            self._kept.append(kept)
            self._asked = True

    @property
    def unmet(self) -> list[str]:
        """What the command or the settings ask of layers and no layer takes."""
        if self._plan.recipe is not None:
            if self.refusal and self._plan.compiling and not self._ended:  # a comparison tells of refusals itself
                return [f"--convert matched nothing in this program; {self.refusal}", *self._idle]
            return [*self._idle, *(self._met_nothing() if self._any else ())]
        idle = []
        if self._plan.compiling and self._plan.convert.keys() - {"high"}:
            live = self._plan.command == ("ng.watch",)
            why = "ng.watch converts nothing; call ng.convert" if live else "`--convert RECIPE` was not given"
            idle.append(f"convert: the table was not used: {why}.")
        if not self._asked or self._switched:
            return [*idle, *self._idle, *(self._met_nothing() if self._switched else ())]
        whose = "layers that --convert or the program takes to FP8, torchao's and TransformerEngine's"
        return [*idle, f"high matched nothing in this program; it is for {whose}."]

    def _met_nothing(self) -> list[str]:
        """The tables of switches all of whose layers are in no FP8, beside others that met some."""
        tables = () if self._in_parts else self._plan.convert.get("high", ())
        return [
            f"high[{i}]: none of the layers that it names is in FP8, so there was nothing to switch."
            for i in range(len(tables))
            if i not in self._met
        ]

    def _hear(self, model: nn.Module, prefix: str) -> None:
        """Look at the layers that the program itself converted, unless somebody does already."""
        observers = [module._fp8.observer for module in model.modules() if isinstance(module, Fp8Linear)]
        if any(observer is not None and not self._is_ours(observer) for observer in observers):
            self._notes.append(
                "The program watches the layers that it converted by an observer of its own; their tensors are not "
                "recorded here."
            )
        elif observers:
            self._observe(model, prefix)

    def _observe(self, model: nn.Module, prefix: str) -> None:
        states = [module._fp8 for module in model.modules() if isinstance(module, Fp8Linear)]
        observer = self._recorder.under(prefix, model)
        for state in states:
            if state.observer is None:  # or else it is a layer of another model, too, and has its name from there
                state.observer = observer
                self.observed = True
                self._layers[observer.name(state.name)] = state

    def _converted(
        self, model: nn.Module, *, beside: bool, strict: bool = True, skip: Sequence[str] = ()
    ) -> ConversionReport:
        """Convert the model; in a rehearsal, back again."""
        if self._plan.recipe is not None:
            left = {"high": self._kept[-1].tables} if self._kept else {}  # those that speak of others are met
            rules = {**self._plan.convert, **left, "beside": beside, "strict": strict}
            if skip:
                asked = rules.get("skip", ())
                rules["skip"] = [*([asked] if isinstance(asked, str) else asked), *skip]
            report = convert(model, by_name(self._plan.recipe), **rules)[1]
            switches = [Switch.of(table) for table in self._plan.convert.get("high", ())]
            self._met |= {i for i, switch in enumerate(switches) if any(map(switch.met, report.rows))}
            return report
        refusals: dict[str, ConversionError] = {}
        for name in self._plan.rehearse:
            try:
                report = convert(model, by_name(name), **self._plan.convert, beside=beside)[1]
            except ConversionError as refusal:
                refusals[str(refusal)] = refusal
                continue
            revert(model)
            return report
        raise ConversionError(" ".join(refusals))

    def leave(self, models: Iterable[nn.Module]) -> None:
        """Nothing of ours hears these models' layers any more, and what was switched is as it was."""
        for kept in self._kept:
            self._idle += kept.undo()
        for model in models:
            for module in model.modules():
                if isinstance(module, Fp8Linear) and self._is_ours(module._fp8.observer):
                    module._fp8.observer = None

    def _is_ours(self, observer: Observer | None) -> bool:
        return isinstance(observer, Recorder) and observer.collector is self._recorder.collector

    def copies(self, site: str) -> int | None:
        """The lowest rank with the same values at a site, if a converted layer knows."""
        name, _, role = site.rpartition(":")
        layer = self._layers.get(name)
        return None if layer is None else layer.copies.get(role)

    def mesh(self, site: str) -> int | None:
        """The lowest rank of the mesh that a converted layer's weight lies on."""
        name, _, role = site.rpartition(":")
        layer = self._layers.get(name)
        return lowest(layer.mesh) if layer is not None and role == "weight" and layer.mesh is not None else None

    def refused(self, error: BaseException | None) -> bool:
        """Whether this is how a conversion that the command asked for ended."""
        return any(error is refusal for refusal in self._refusals)

    @property
    def refusal(self) -> str:
        """Why no model was converted, though at least one was tried; "" if one was."""
        return "" if self._any else " ".join(dict.fromkeys(map(str, self._refusals)))

    def facts(self) -> dict[str, Any]:
        """What is known about converted layers, for the run's metadata."""
        told = self._rows.facts()
        # A recipe can be emulated on a GPU whose other recipes are native: what ran decides, not the machine.
        backends = {row["backend"] for row in told["conversion"] if row["recipe"]}
        return {
            **({"emulated": "reference" in backends or not native_fp8()} if backends else {}),
            **told,
            **({"switched": self._switched} if self._switched else {}),
        }


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not isinstance(module, Fp8Linear)
