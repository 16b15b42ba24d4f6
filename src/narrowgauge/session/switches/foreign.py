"""`[[high]]` for layers that are in FP8 already: by the switches of whose they are, before the model first runs.

    narrowgauge           the layer's recipe, where the program itself has called `ng.convert`            own.py
    torchao               the layer's configuration: a product's two casts disabled          torchao.py
    TransformerEngine     a layer left out of the autocast, or its quantizers for a product   transformer_engine.py

What a package cannot do is refused before anything is changed. The same tables may speak of layers that `--convert`
takes to FP8: `Kept.tables` is what is left for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from narrowgauge.compute.nn.conversion.rules import covers
from narrowgauge.compute.nn.conversion.structure import Layer, clean, is_wrapper, survey
from narrowgauge.compute.nn.conversion.switches import Switch, check_switches
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.session.sites.torchao import TorchAO
from narrowgauge.session.switches import own, torchao, transformer_engine


@dataclass
class Kept:
    """What was switched in one model.

    told      layer -> what stays high, in words
    tables    those that still speak of other layers, for `convert`
    met       which of the tables, by their places, met a layer that the program has in FP8
    """

    told: dict[str, str]
    tables: list[Mapping[str, Any]]
    met: set[int] = field(default_factory=set)
    _undo: list[Callable[[], list[str]]] = field(default_factory=list)

    def undo(self) -> list[str]:
        """Leave nothing of ours in the program; what the switches did not do, one sentence each. Twice is harmless."""
        notes = [note for undo in self._undo for note in undo()]
        self._undo.clear()
        return notes


def switch(model: nn.Module, tables: Sequence[Mapping[str, Any]], called: nn.Module, *, converting: bool) -> Kept:
    """Keep high what the tables name of layers in `model` that the program has in FP8.

    Args:
        model: whatever it holds; without such a layer, nothing happens.
        tables: as `convert(high=...)` takes them.
        called: the module whose call has just begun: the model, a wrapper of it, or a part.
        converting: whether other layers are converted, and the tables may speak of these; what is converted already
            had its switches then.

    Raises ConversionError for what a package has no switch for, and for a name that no layer has.
    """
    layers = survey(model)
    casting = [layer for layer in layers if TorchAO().knows(layer.module)]
    engine = transformer_engine.layers(model)
    ours = [] if converting else [layer for layer in layers if isinstance(layer.module, Fp8Linear)]
    if not casting and not engine and not ours:
        return Kept({}, list(tables))
    switches = [Switch.of(table) for table in tables]
    if engine or not converting:
        wrapped = is_wrapper(model)
        names = [clean(name, wrapped=wrapped) for name, _ in model.named_modules()]
        check_switches(switches, [*layers, *engine], names)
    chosen = transformer_engine.chosen(engine, switches)  # refuses before torchao's layers are changed
    told = torchao.switch(casting, switches)
    told |= {layer.name: what for layer, _, what in chosen}
    left = _of_others(tables, layers) if engine else list(tables)
    undo = [transformer_engine.switch(chosen, called)] if chosen else []
    if ours:
        kept, as_before = own.switch(ours, switches)
        told, undo = told | kept, [*undo, as_before]
    taken = [layer for layer in (*casting, *(layer for layer, _, _ in chosen), *ours) if layer.name in told]
    met = {place for place, each in enumerate(switches) if any(map(each.names, taken))}
    return Kept(told, left, met, undo)


def _of_others(tables: Sequence[Mapping[str, Any]], layers: Sequence[Layer]) -> list[Mapping[str, Any]]:
    """The tables without the globs that none of these layers has, and without those that had no other."""
    left: list[Mapping[str, Any]] = []
    for table in tables:
        sites = Switch.of(table).sites
        known = [glob for glob in sites if any(covers(glob.removeprefix("!"), layer) for layer in layers)]
        wanted = [glob for glob in sites if not glob.startswith("!")]
        if not wanted or any(glob in known for glob in wanted):
            left.append({**table, "sites": known or ["*"]})
    return left
