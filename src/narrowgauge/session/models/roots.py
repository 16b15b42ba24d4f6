"""The models of a program: found, fingerprinted, perturbed or converted once, then followed call by call.

    root    a module that the program calls, and that owns trained parameters
    model   the whole that a root belongs to (family.py): mostly the root itself

A program can have several models. The layers of the first keep their names, those of the others carry their model's
class in front. Stages of a pipeline that are on one rank and have layers of one name carry their number; those of
several ranks are told apart as ranks merge. A model that cannot be converted is left as it is and told, unless there is
no other.

A program may add to a model that it trains, or exchange a part of it: a new head, adapters. At its next call the model
is looked at once more.

Models are held weakly: a program that trains one after the other keeps none for our sake, and the next one has the
names of the last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgauge.compute.nn.conversion.rule_checks import some
from narrowgauge.session.models.conversions import Conversions
from narrowgauge.session.models.everywhere import held_by_all, part_of
from narrowgauge.session.models.family import Family, held_by
from narrowgauge.session.models.model import Model
from narrowgauge.session.models.perturb import perturb
from narrowgauge.session.models.root import AUTOCAST, Root
from narrowgauge.session.plan import Plan
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.sites.part import named
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.tensors.fingerprint import weights_hash, weights_of
from narrowgauge.session.tensors.sharded import copied_by, shape_of
from narrowgauge.session.tensors.shares import learn
from narrowgauge.session.tensors.weakly import Weak, weakly

MOST_NAMED = 8  # layers that a model got, in one sentence
MOST_CHANGES = 256  # of a model, that are followed: some make a part of it anew in every step


class Roots:
    """All models of the program, and the roots through which they are called."""

    def __init__(self, plan: Plan, recorder: Recorder, plain: PlainSites, family: Family | None = None) -> None:
        self._plan, self._recorder, self._plain = plan, recorder, plain
        self.family = family or Family()
        self.conversions = Conversions(plan, recorder)
        self._roots: dict[int, Root] = {}
        self._models: list[Model] = []  # those that live
        self._taken = self._parameters = 0  # how many there were, and how many elements they have
        self._began: tuple[tuple[int, tuple[int, ...]], str] = (0, ()), ""  # of how many, what of them was trained
        self._unmade: list[Weak] = []  # parameters that lazy modules had still to make
        self._device = ""
        self._hashes: list[str] = []
        self.notes: list[str] = []
        self._linear_dtype = ""
        self._copied: dict[str, int | None] = {}  # by the prefix of a model's sites
        self._stages: dict[str, int | None] = {}  # of layers: their last step may be merged when their model is gone

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._roots

    def __len__(self) -> int:
        return len(self._roots)

    @property
    def taken(self) -> int:
        """How many models there were."""
        return self._taken

    def began(self, trained: Sequence[Tensor]) -> str:
        """A name for the weights that the models began with and which are `trained`; "" if none is of a model here.

        What is of no model (the copies that an outer optimizer steps) counts with its values, when it is first met.
        """
        key = self._taken, tuple(map(id, trained))
        if key != self._began[0]:
            places = {at: i for i, at in enumerate(at for known in self._models for at in known.parameters())}
            which = [places.get(at) for at in key[1]]
            known = any(place is not None for place in which)
            others = [(str(i), p) for i, p in enumerate(trained) if which[i] is None] if known else []
            said = repr((self._hashes, which, weights_hash(others) if others else ""))
            self._began = key, hashlib.sha256(said.encode()).hexdigest()[:16] if known else ""
        return self._began[1]

    def called_in(self, turn: int) -> list[nn.Module]:
        """Those that were called with gradients in this turn of the threads."""
        return [root.module for root in self._roots.values() if root.alive and root.heard_in == turn]

    def living(self) -> list[Root]:
        """Those that the program still has."""
        return [root for root in self._roots.values() if root.alive]

    def registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """`child` became a part of `parent`, which may be one of a model."""
        self.family.registered(parent, child)
        for known in self._models:
            known.changed |= child is not None and id(parent) in known.parts

    @property
    def changed(self) -> bool:
        """Whether a model may have parts that it had not when it was looked at."""
        for known in self._models:  # noqa: SIM110 - asked at every call: a generator takes longer
            if known.changed:
                return True
        return False

    def renew(self) -> str:
        """Take in what the program has added to its models since they were taken; in words what, "" if nothing."""
        told = []
        for known in [known for known in self._models if known.changed]:
            model = known.module()
            if model is None or known.times >= MOST_CHANGES:
                known.changed = False
                continue
            known.look(model)
            self._count(known)
            what = self.conversions.added(model, known.prefix, known.left_alone(model), self._shared(known))
            new = self._plain.add(model, self._recorder.under(known.prefix, model))
            if new and not what:
                what = f"{some([named(known.prefix, name) for name in new], MOST_NAMED)}, watched from now on"
            told += [what] if what else []
            known.times += bool(what or new)
            if known.times == MOST_CHANGES:
                self.notes.append(
                    f"The program changed its {known.kind} {MOST_CHANGES} times: what it adds later is not followed."
                )
        return "; ".join(told)

    def whole(self, optimizers: Trained) -> nn.Module | None:
        """The outermost module that holds most of what is trained, found without anybody calling it."""
        trained = optimizers.ids()
        owners = [m for m in self.family.known() if any(id(p) in trained for p in m.parameters(recurse=False))]
        wholes = {id(whole): whole for whole in (self.family.model_of(owner, trained) for owner in owners)}
        return max(wholes.values(), key=lambda m: sum(math.prod(shape_of(p)) for p in m.parameters()), default=None)

    def around(self, module: nn.Module) -> nn.Module | None:
        """The model that is known and that it is, or a part of."""
        for known in list(self._models):
            whole = known.module()
            if id(module) in known.parts and whole is not None and any(part is module for part in whole.modules()):
                return whole
        return None

    def unfollowed(self, module: nn.Module) -> Root | None:
        """The root that this module is, if it has no hook: the program calls something compiled of it."""
        root = self._roots.get(id(module))
        return root if root is not None and root.alive and not root.followed else None

    def around_call(self, module: nn.Module) -> Root | None:
        """Of a model that is called itself, and has no hook: its root, heard where the program calls what wraps it."""
        own = self._roots.get(id(module))
        if own is not None and own.followed:
            return None
        for root in list(self._roots.values()):  # one may come or go: nobody keeps an error from the program
            if root.alive and root.is_of(module):
                return root
        return None

    def take(self, module: nn.Module, optimizers: Trained, stage: int | None = None) -> Root:
        """Take `module` as a root; with a new model: fingerprint it, then perturb or convert it as the plan says.

        `stage` is its number in a pipeline, if it was called in one.

        Raises RecipeError, or ConversionError when the plan's conversion is not possible and no other model is left.
        """
        before = self._roots.get(id(module))
        root = self._root(module)
        if before is not None and before.alive and before.module is module:  # a wrapper, say, which is no model's part
            root.belongs_to(before.model)
            return root
        if (around := self.around(module)) is not None:
            root.belongs_to(around)
            return root
        trained = optimizers.ids()
        whole = self.family.model_of(module, trained)
        model = unwrapped(whole)
        root.belongs_to(model)
        shared = self._add(model, *self.family.holder_of(whole, trained), stage)
        if not shared:
            self._hashes.append(weights_hash(weights_of(model)))
            self._watch_dtype(model)
            if self._plan.noise:
                perturb(model, self._plan.noise, self._plan.seed)
        prefix = self._name()
        learn((module, *whole.modules()))
        self._copied[prefix] = copied_by((module, *whole.modules()))
        if stage is not None or self._stages:
            self._stages.update(dict.fromkeys((named(prefix, layer) for layer in self._models[-1].layers), stage))
        self.conversions.switch(model, module, prefix)
        self.conversions.convert(
            *(model, prefix, shared),
            whole=lambda: trained <= self._parameters_seen() and stage is None and held_by_all(module, whole),
            part=lambda: part_of(module, whole) if stage is None else "",  # the number tells stages apart
        )
        self._plain.add(model, self._recorder.under(prefix, model))
        return root

    def hooked_late(self, module: nn.Module) -> None:
        """This one is called, and the hooks of its layers may have come after torch had read which it has."""
        self._plain.called(module)

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

    def _add(self, model: nn.Module, holder: nn.Module, own: str, stage: int | None) -> set[int]:
        """Keep a model in mind; the ids of what it shares with those that are known: two towers, actor and critic."""
        new = Model(model, self._models.remove, holder, own, stage)
        self._models.append(new)
        self._count(new)
        self._taken += 1
        return self._shared(new)

    def _shared(self, model: Model) -> set[int]:
        others = [known.module() for known in self._models if known is not model]
        return {id(m) for other in others if other is not None for m in other.modules()} & model.parts

    def _count(self, model: Model) -> None:
        """Count the parameters that are no other model's."""
        before = self._models[: self._models.index(model)]  # those that came later have left out what is this one's
        counted = {at for known in before for at in known.parameters()}
        unmade = {id(known()) for known in self._unmade}  # counted when the program has made them
        own = [p for at, p in model.parameters().items() if at not in counted | unmade]
        elements = sum(math.prod(shape_of(p)) for p in own)
        self._parameters += elements - model.elements
        model.elements = elements
        self._unmade += [weakly(p) for p in own if is_lazy(p)]

    def _all_parameters(self) -> int:
        late = [known() for known in self._unmade]
        return self._parameters + sum(math.prod(shape_of(p)) for p in late if p is not None)

    def _parameters_seen(self) -> set[int]:
        return {at for known in self._models for at in known.parameters()}

    def _name(self) -> str:
        """What stands in front of the names of the latest model, and of no other that lives."""
        *others, new = self._models
        taken = {other.prefix for other in others}
        new.prefix = new.own
        if new.stage is not None:
            clash = not all(map(new.beside, others))
        else:
            clash = any((new.own or other.own) and not new.beside(other) for other in others) or new.own in taken
        if clash:
            number = sum(other.kind == new.kind for other in others)
            prefix = f"{new.kind}{number or ''}." if new.stage is None else f"stage{new.stage}."
            while prefix in taken:
                number += 1
                prefix = f"{new.kind}{number}."
            new.prefix = prefix
        return new.prefix

    def settle(self) -> None:
        """No lazy module makes a parameter any more: count those that are made, while they are known."""
        self._parameters, self._unmade = self._all_parameters(), []

    def leave(self) -> None:
        """Nothing of ours hears the models any more.

        A graph that the program still holds would otherwise keep the run's writer alive to the interpreter's very end,
        where duckdb's bindings complain on the program's stderr.
        """
        for root in list(self._roots.values()):
            root.leave()
        models = (known.module() for known in list(self._models))
        self.conversions.leave(model for model in models if model is not None)

    def stage(self, site: str) -> int | None:
        """The stage of a pipeline that a site is in; None if it is in none."""
        layer = site.rpartition(":")[0] if self._stages else ""
        while layer and layer not in self._stages:  # or it is one product of a layer
            layer = layer.rpartition(".")[0]
        return self._stages.get(layer)

    def copies(self, site: str) -> int | None:
        """The lowest rank with the same values at a site, if a converted layer or a wrapper around it knows."""
        first = self.conversions.copies(site)
        if first is not None or not site.endswith(":weight"):
            return first
        name = site.rpartition(":")[0]
        known = (p for p in self._copied if site.startswith(p) or name == named(p, ""))
        return self._copied.get(max(known, key=len, default=""))

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
        return {
            "models": self._taken,
            "parameters": self._all_parameters(),
            "device": self._device,
            "baseline_dtype": self._plain.shown.dtype or self._linear_dtype or "no nn.Linear ran",
            "weights_hash": " ".join(self._hashes),
            **self.conversions.facts(),
            **({"stages": staged} if (staged := {n: s for n, s in self._stages.items() if s is not None}) else {}),
        }


def unwrapped(module: nn.Module) -> nn.Module:
    """What a wrapper wraps, so that layers have the names that the program's author gave them.

    What a wrapper wraps may be wrapped again, and it may be compiled itself.

    >>> unwrapped(nn.parallel.DataParallel(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    while True:
        compiled = module._modules.get("_orig_mod")  # torch.compile's; what it compiled may have no truth, nor a length
        wrapped = held_by(module if compiled is None else compiled)
        if wrapped is None:
            return module
        module = wrapped
