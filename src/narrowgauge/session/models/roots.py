"""The models of a program: found, fingerprinted, perturbed or converted once, then followed call by call.

    root    a module that the program calls, and that owns trained parameters
    model   the whole that a root belongs to (family.py): mostly the root itself

A program can have several models. The layers of the first keep their names, those of the others carry their model's
class in front; a model that cannot be converted is left as it is and told, unless there is no other.

Models are held weakly: a program that trains one after the other keeps none for our sake, and the next one has the
names of the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgauge.compute.nn import ConversionReport, convert, revert
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.recipes import by_name
from narrowgauge.errors import ConversionError, RecipeError
from narrowgauge.session.machine import native_fp8
from narrowgauge.session.models.family import Family
from narrowgauge.session.models.perturb import perturb
from narrowgauge.session.models.root import AUTOCAST, Root
from narrowgauge.session.plan import Plan
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.sites.part import named
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.switches import foreign
from narrowgauge.session.tensors.fingerprint import weights_hash
from narrowgauge.session.tensors.sharded import class_name, copied_by, lowest, shape_of


class Model:
    """A model that was taken, as long as it lives."""

    def __init__(self, model: nn.Module, gone: Callable[[Model], None]) -> None:
        self.kind, self.prefix = class_name(model), ""
        self.parts = {id(m) for m in model.modules()}
        self.module = ref(model, lambda _: gone(self))

    def parameters(self) -> dict[int, Tensor]:
        """Its parameters by id; none if it is gone."""
        model = self.module()
        return {} if model is None else {id(p): p for p in model.parameters()}


class Roots:
    """All models of the program, and the roots through which they are called."""

    def __init__(self, plan: Plan, recorder: Recorder, plain: PlainSites, family: Family | None = None) -> None:
        self._plan, self._recorder, self._plain = plan, recorder, plain
        self.family = family or Family()
        self._roots: dict[int, Root] = {}
        self._models: list[Model] = []  # those that live
        self._taken = self._parameters = 0  # how many there were, and how many elements they have
        self._unmade: list[ref[Tensor]] = []  # parameters that lazy modules had still to make
        self._device = ""
        self._reports: dict[str, ConversionReport] = {}  # by the prefix of the model's names
        self._refusals: list[ConversionError | RecipeError] = []
        self._hashes: list[str] = []
        self._linear_dtype = ""
        self._switched: dict[str, str] = {}  # layers of other packages, and which products stay high
        self._asked = False  # the settings name some
        self._kept: list[foreign.Kept] = []
        self._idle: list[str] = []  # switches that did nothing
        self._copied: dict[str, int | None] = {}  # by the prefix of a model's sites
        self._layers: WeakValueDictionary[str, LayerState] = WeakValueDictionary()  # converted ones, by their names
        self.notes: list[str] = []

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._roots

    def __len__(self) -> int:
        return len(self._roots)

    @property
    def taken(self) -> int:
        """How many models there were."""
        return self._taken

    def whole(self, optimizers: Trained) -> nn.Module | None:
        """The outermost module that holds most of what is trained, found without anybody calling it."""
        trained = optimizers.ids()
        owners = [m for m in self.family.known() if any(id(p) in trained for p in m.parameters(recurse=False))]
        wholes = {id(whole): whole for whole in (self.family.model_of(owner, trained) for owner in owners)}
        return max(wholes.values(), key=lambda m: sum(math.prod(shape_of(p)) for p in m.parameters()), default=None)

    def take(self, module: nn.Module, optimizers: Trained) -> Root:
        """Take `module` as a root; with a new model: fingerprint it, then perturb or convert it as the plan says.

        Raises RecipeError, or ConversionError when the plan's conversion is not possible and no other model is left.
        """
        root = self._root(module)
        for known in list(self._models):
            whole = known.module()
            if id(module) in known.parts and whole is not None and any(part is module for part in whole.modules()):
                root.belongs_to(whole)
                return root
        trained = optimizers.ids()
        model = unwrapped(self.family.model_of(module, trained))
        root.belongs_to(model)
        shares = self._add(model)
        if not shares:
            self._hashes.append(weights_hash(model.state_dict(keep_vars=True).items()))
            self._watch_dtype(model)
            if self._plan.noise:
                perturb(model, self._plan.noise, self._plan.seed)
        prefix = self._name()
        self._copied[prefix] = copied_by((module, *model.modules()))
        self._switch(model, module, prefix)
        self._convert(model, trained, prefix, shares)
        self._plain.add(model, self._recorder.under(prefix))
        return root

    def _root(self, module: nn.Module) -> Root:
        at = id(module)
        root = Root(module, AUTOCAST.get(self._plan.baseline), gone=lambda root: self._left(at, root))
        self._roots[at] = root
        self._device = self._device or str(root.device)
        return root

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Meanwhile no root has a hook of ours."""
        roots = list(self._roots.values())
        for root in roots:
            root.leave()
        try:
            yield
        finally:
            for root in roots:
                root.come_back()

    def _left(self, at: int, root: Root) -> None:
        if self._roots.get(at) is root:  # and not another's, at the same address
            del self._roots[at]

    def _add(self, model: nn.Module) -> bool:
        """Keep a model in mind; whether it shares parts with one that is known: two towers, actor and critic."""
        new = Model(model, self._models.remove)
        known = any(not other.parts.isdisjoint(new.parts) for other in self._models)
        counted = {at for other in self._models for at in other.parameters()}
        self._parameters += sum(math.prod(shape_of(p)) for at, p in new.parameters().items() if at not in counted)
        self._unmade += [ref(p) for at, p in new.parameters().items() if at not in counted and is_lazy(p)]
        self._models.append(new)
        self._taken += 1
        return known

    def _name(self) -> str:
        """What stands in front of the names of the latest model, and of no other that lives."""
        *others, new = self._models
        taken = {other.prefix for other in others}
        if "" in taken:
            number = sum(other.kind == new.kind for other in others)
            while (prefix := f"{new.kind}{number or ''}.") in taken:
                number += 1
            new.prefix = prefix
        return new.prefix

    def _convert(self, model: nn.Module, trained: set[int], prefix: str, shares: bool) -> None:
        if self._plan.recipe is None and not self._plan.rehearse:
            self._hear(model, prefix)
            return
        if shares and not any(isinstance(m, nn.Linear) and not isinstance(m, Fp8Linear) for m in model.modules()):
            return  # a wrapper, say
        try:
            report = self._converted(model, beside=shares)
        except RecipeError as refusal:  # a backend that cannot: no other model of this program will be converted
            self._refusals.append(refusal)
            raise
        except ConversionError as refusal:
            self._refusals.append(refusal)
            seen = {at for known in self._models for at in known.parameters()}
            if not self._reports and trained <= seen:
                raise
            if self._plan.recipe is None:
                return
            self.notes.append(f"One of the script's models stays in the baseline's precision: {refusal}")
            return
        self._reports[prefix] = report
        if self._plan.recipe is not None:
            self._observe(model, prefix)

    def _switch(self, model: nn.Module, called: nn.Module, prefix: str) -> None:
        high = self._plan.convert.get("high", ())
        if high and self._plan.compiling:  # a comparison's baseline is the program as it is written
            kept = foreign.switch(model, high, called, converting=self._plan.recipe is not None)
            self._switched |= {named(prefix, name): what for name, what in kept.told.items()}
            self._kept.append(kept)
            self._asked = True

    @property
    def unmet(self) -> list[str]:
        """What the settings ask of layers and no layer takes."""
        if not self._asked or self._switched or self._plan.recipe is not None:
            return self._idle
        whose = "layers that --convert takes to FP8, torchao's and TransformerEngine's"
        return [f"high matched nothing in this program; it is for {whose}."]

    def _hear(self, model: nn.Module, prefix: str) -> None:
        """Look at the layers that the program itself converted, unless somebody does already."""
        observers = [module._fp8.observer for module in model.modules() if isinstance(module, Fp8Linear)]
        if any(observer is not None and not self._is_ours(observer) for observer in observers):
            self.notes.append(
                "The program watches the layers that it converted by an observer of its own; their tensors are not "
                "recorded here."
            )
        elif observers:
            self._observe(model, prefix)

    def _observe(self, model: nn.Module, prefix: str) -> None:
        states = [module._fp8 for module in model.modules() if isinstance(module, Fp8Linear)]
        for state in states:
            if state.observer is None:  # or else it is a layer of another model, too, and has its name from there
                state.observer = self._recorder.under(prefix)
                self._layers[named(prefix, state.name)] = state

    def _converted(self, model: nn.Module, *, beside: bool) -> ConversionReport:
        """Convert the model; in a rehearsal, back again."""
        if self._plan.recipe is not None:
            left = {"high": self._kept[-1].tables} if self._kept else {}  # those that speak of others are met
            return convert(model, by_name(self._plan.recipe), **{**self._plan.convert, **left}, beside=beside)[1]
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

    def leave(self) -> None:
        """Nothing of ours hears the models any more.

        A graph that the program still holds would otherwise keep the run's writer alive to the interpreter's very end,
        where duckdb's bindings complain on the program's stderr.
        """
        for root in list(self._roots.values()):
            root.leave()
        for kept in self._kept:
            self._idle += kept.undo()
        for known in list(self._models):
            model = known.module()
            for module in () if model is None else model.modules():
                if isinstance(module, Fp8Linear) and self._is_ours(module._fp8.observer):
                    module._fp8.observer = None

    def _is_ours(self, observer: Observer | None) -> bool:
        return isinstance(observer, Recorder) and observer.collector is self._recorder.collector

    def copies(self, site: str) -> int | None:
        """The lowest rank with the same values at a site, if a converted layer or a wrapper around it knows."""
        name, _, role = site.rpartition(":")
        layer = self._layers.get(name)
        first = None if layer is None else layer.copies.get(role)
        if first is not None:
            return first
        if not site.endswith(":weight"):
            return None
        known = (p for p in self._copied if site.startswith(p) or name == named(p, ""))
        return self._copied.get(max(known, key=len, default=""))

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
        return "" if self._reports else " ".join(dict.fromkeys(map(str, self._refusals)))

    def _watch_dtype(self, module: nn.Module) -> None:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        if linear is None:
            return
        if self._plan.compiling:  # a hook that comes and goes would have graphs compiled again: what should run
            # Not `linear.weight`: a parametrization computes it at each look, and spectral norm moves on as it does.
            weight = next(linear.parameters(), None)
            if weight is None:
                return
            device = weight.device.type
            expected = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
            self._linear_dtype = str(expected).removeprefix("torch.")
            return

        def once(_module: nn.Module, _args: Any, output: Any) -> None:
            handle.remove()
            if isinstance(output, Tensor):  # a subclass may return what it likes
                self._linear_dtype = str(output.dtype).removeprefix("torch.")

        handle = linear.register_forward_hook(once)

    def facts(self) -> dict[str, Any]:
        """What is known about the models, for the run's metadata."""
        reports = self._reports if self._plan.recipe is not None else {}
        rows = [
            {**row, "name": named(prefix, row["name"])}
            for prefix, report in reports.items()
            for row in report.to_dict()["rows"]
        ]
        late = [p() for p in self._unmade]
        # A recipe can be emulated on a GPU whose other recipes are native: what ran decides, not the machine.
        backends = {row["backend"] for row in rows if row["recipe"]}
        return {
            **({"emulated": "reference" in backends or not native_fp8()} if backends else {}),
            "models": self._taken,
            "parameters": self._parameters + sum(math.prod(shape_of(p)) for p in late if p is not None),
            "device": self._device,
            "baseline_dtype": self._plain.shown.dtype or self._linear_dtype or "no nn.Linear ran",
            "weights_hash": " ".join(self._hashes),
            "conversion": rows,
            **({"switched": self._switched} if self._switched else {}),
            "conversion_summary": [
                {k: v for k, v in report.to_dict().items() if k != "rows"} for report in reports.values()
            ],
        }


def unwrapped(module: nn.Module) -> nn.Module:
    """What a wrapper wraps, so that layers have the names that the program's author gave them.

    A wrapper holds one module, called `module`, and no parameter of its own: DistributedDataParallel, an engine of
    DeepSpeed. What it wraps may be wrapped again.

    >>> unwrapped(nn.parallel.DataParallel(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    while list(module._modules) == ["module"] and not module._parameters and module._modules["module"] is not None:
        module = module._modules["module"]
    return module
