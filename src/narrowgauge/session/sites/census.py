"""Which parameters a run's models have, who owns them, and which of them were never seen as a weight.

What no kind and no product told of is named by the class of its owner, with its share of all parameters, and by the
first names where no reason is known: nothing is passed over in silence. Models are held weakly, and parameters no
longer than a recorded step: what is told at the end was noted when a model was taken. Modules have numbers of ours, for
the next model of a search or of a fold lies where the last one did, and has its ids; what is gone is kept as sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgauge.compute.nn.conversion.rule_checks import some
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.nn.parallel.placements import some_are_distributed
from narrowgauge.session.sites.part import Part
from narrowgauge.session.tensors.sharded import class_name, shape_of
from narrowgauge.session.tensors.weakly import Weak, weakly

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
_WHY = {
    "Bilinear": "a product of three tensors",
    "Embedding": "looked up, not multiplied",
    "EmbeddingBag": "looked up, not multiplied",
    "VocabParallelEmbedding": "looked up, not multiplied",
    **dict.fromkeys(_RECURRENT, "multiplied inside one kernel"),
}
MOST_NAMED = 3  # parameters of one kind of owner


class Owner(NamedTuple):
    """Whose parameter it is: the site's name, the module, its name there, and who looks at that model."""

    site: str
    module: nn.Module
    name: str
    observer: Observer


class Noted(NamedTuple):
    """What was noted of a parameter."""

    at: tuple[int, str]  # the number of its module, and its name there
    parameter: tuple[int, str]  # where it was first met: a shared one is known by it
    site: str
    observer: Observer  # who knows the site's name in the run
    kind: str
    elements: int
    matrix: bool
    converted: bool

    @property
    def name(self) -> str:
        """As the site's rows have it."""
        return str(getattr(self.observer, "name", str)(self.site))


@dataclass(slots=True)
class Unseen:
    """What was never multiplied, of one kind of owner."""

    owners: int = 0
    elements: int = 0
    names: dict[str, None] = field(default_factory=dict)  # in their order; models that follow each other share them


def plain_name(name: str) -> str:
    """A module's name without those that wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class Census:
    """The models' parameters.

    `spread`: in the open step, some are distributed between their uses.
    """

    def __init__(self) -> None:
        self._models: list[tuple[ref[nn.Module], Observer]] = []
        self._noted: dict[tuple[int, str], Noted] = {}
        self._seen: set[tuple[int, str]] = set()  # by the numbers of modules
        self._numbers: dict[int, tuple[ref[nn.Module], int]] = {}  # of modules, by their ids
        self._counted = count()
        self._met: dict[int, tuple[Weak, tuple[int, str]]] = {}  # parameters by id, and where first met
        self._gone: dict[str, Unseen] = {}  # of models that are no more
        self._gone_elements = 0  # of all their parameters
        self._owners: dict[int, Owner] = {}  # of one step: a sharded parameter is another tensor while it is whole
        self._kept: dict[tuple[int, str], Tensor] = {}  # by the ids of modules, which live as long as the step
        self._weights: set[tuple[int, str]] = set()  # where they were first met: vectors of which weights are pieces
        self.spread = False
        self._late = False  # there may be parameters that were not noted: a lazy module had still to make one, say

    def add(self, model: nn.Module, observer: Observer) -> None:
        """Count a model's parameters too."""
        self._let_go()
        self._models.append((ref(model), observer))
        self._note(model, observer)

    def _number(self, module: nn.Module) -> int:
        known = self._numbers.get(id(module))
        if known is None or known[0]() is not module:
            known = self._numbers[id(module)] = ref(module), next(self._counted)
        return known[1]

    def _first_met(self, parameter: Tensor, at: tuple[int, str]) -> tuple[int, str]:
        known = self._met.get(id(parameter))
        if known is None or known[0]() is not parameter:
            known = self._met[id(parameter)] = weakly(parameter), at
        return known[1]

    def _let_go(self) -> None:
        """Keep the sums of what is no more: a search makes thousands of models, and steps look at all that is noted."""
        models = [known for known in self._models if known[0]() is not None]
        if len(models) == len(self._models):
            return
        self._models, living = models, {number for known, number in self._numbers.values() if known() is not None}
        stays = {row.parameter for at, row in self._noted.items() if at[0] in living}
        gone = [row for at, row in self._noted.items() if at[0] not in living]
        seen = {row.parameter for row in gone if row.at in self._seen}
        self._seen.update(at for at, row in self._noted.items() if row.parameter in seen)
        self._gone_elements += _elements(row for row in gone if row.parameter not in stays)
        _add([row for row in self._missing() if row.at[0] not in living and row.parameter not in stays], self._gone)
        self._noted = {at: row for at, row in self._noted.items() if at[0] in living}
        self._seen = {at for at in self._seen if at[0] in living}
        self._numbers = {at: known for at, known in self._numbers.items() if known[1] in living}
        met = {row.parameter for row in self._noted.values()}
        self._met = {at: known for at, known in self._met.items() if known[1] in met}
        self._weights &= met

    def _note(self, model: nn.Module, observer: Observer) -> None:
        for path, module in model.named_modules():
            number = self._number(module)
            for name, p in module._parameters.items():
                if p is None:
                    continue
                self._late |= is_lazy(p)
                at, shape, kind = (number, name), shape_of(p), class_name(module)
                whose = at, self._first_met(p, at), _site(path, name), observer
                converted = isinstance(module, Fp8Linear)
                self._noted[at] = Noted(*whose, kind, math.prod(shape), len(shape) >= 2, converted)

    def begin(self) -> None:
        """A step begins: parameters are as they are between their uses."""
        self._owners.clear()
        self._note_late()
        self._kept = {}
        self.spread = some_are_distributed()
        if self.spread:  # only of these it is not what they are when they are used
            self._kept = {(id(m), name): p for model, _ in self._living() for m, name, p in _parameters(model)}

    def note_again(self) -> None:
        """Known models may have parameters that they had not."""
        self._late = True

    def _note_late(self) -> None:
        if self._late:
            self._late = False
            for model, observer in self._living():
                self._note(model, observer)

    def end(self) -> None:
        """It ended: no parameter is held."""
        self._owners.clear()
        self._kept.clear()

    def kept(self, module: nn.Module, name: str) -> Tensor | None:
        """What this parameter of the module was when the step began; None where none of a program's is distributed."""
        return self._kept.get((id(module), name))

    def owner(self, parameter: Tensor) -> Owner | None:
        """Whose it is; None if it is no model's."""
        if id(parameter) not in self._owners:
            for model, observer in self._living():
                for path, module in model.named_modules():
                    for name, own in module._parameters.items():
                        if own is not None:
                            # A layer in FP8 shows by its own name what it multiplies: this is multiplied elsewhere.
                            whole = isinstance(module, Fp8Linear)
                            site = plain_name(f"{path}.{name}".lstrip(".")) if whole else _site(path, name)
                            self._owners.setdefault(id(own), Owner(site, module, name, observer))
        return self._owners.get(id(parameter))

    def saw(self, module: nn.Module, *names: str) -> Tensor | None:
        """These parameters of the module were multiplied; all of it and its parts if none is named.

        Returns what the first of them was when the step began.
        """
        if names:
            number = self._number(module)
            self._seen.update((number, name) for name in names)
            return self.kept(module, names[0]) if self._kept else None
        self._seen.update((self._number(m), name) for m in module.modules() for name in m._parameters)
        return None

    def multiplied(self, module: nn.Module, part: Part) -> Tensor | None:
        """A part of the module's call was: its weight is seen. Returns what that was when the step began."""
        own, name = module._parameters, None
        if part.w is not None:
            name = "weight" if own.get("weight") is part.w else next((n for n in own if own[n] is part.w), None)
        owner = None if part.w is None or name is not None else self.owner(part.w)
        if owner is not None:
            return self.saw(owner.module, owner.name)
        self.saw(module, *part.holds)
        return self.kept(module, name or "")

    def vector(self, parameter: Tensor) -> None:
        """A parameter of one dimension was multiplied as a matrix: it is a weight, and has no rows."""
        known = self._met.get(id(parameter))
        if known is not None and known[0]() is parameter:
            self._weights.add(known[1])

    def lacks(self) -> bool:
        """Whether a weight was not seen that still could be, or no model is known."""
        self._let_go()
        self._note_late()
        return not self._noted or any(row.kind not in _WHY for row in self._missing())

    def unseen(self) -> str:
        """What was never multiplied, in words; "" if nothing."""
        missing, total = self._by_kind()
        words = []
        for kind, of in missing.items():
            why = f", {_WHY[kind]}" if kind in _WHY else f": {some([*of.names], MOST_NAMED)}"
            words.append(f"{kind} ({of.owners} of them, {of.elements / total:.1%} of all parameters{why})")
        return "; ".join(words)

    @property
    def recurrent(self) -> dict[str, tuple[int, float]]:
        """By their class, how many layers multiply inside one kernel, and their share of all parameters, 0 to 1."""
        missing, total = self._by_kind()
        return {kind: (of.owners, of.elements / total) for kind, of in missing.items() if kind in _RECURRENT}

    def _by_kind(self) -> tuple[dict[str, Unseen], int]:
        """What was never multiplied, the largest share first, and of how many elements in all."""
        self._note_late()
        missing = {kind: Unseen(of.owners, of.elements, {**of.names}) for kind, of in self._gone.items()}
        _add(self._missing(), missing)
        total = self._gone_elements + _elements(self._noted.values())
        return dict(sorted(missing.items(), key=lambda item: -item[1].elements)), total

    def _missing(self) -> list[Noted]:
        everything = list(self._noted.values())
        seen = {row.parameter for row in everything if row.at in self._seen or row.converted}
        weights = (row for row in everything if row.matrix or row.parameter in self._weights)
        return [row for row in weights if row.parameter not in seen]

    def _living(self) -> Iterator[tuple[nn.Module, Observer]]:
        for known, observer in self._models:
            model = known()
            if model is not None:
                yield model, observer


def _elements(rows: Iterable[Noted]) -> int:
    return sum({row.parameter: row.elements for row in rows}.values())


def _add(rows: list[Noted], to: dict[str, Unseen]) -> None:
    """Count these parameters, each once, among those that were not seen."""
    kinds: dict[str, dict[tuple[int, str], Noted]] = {}
    for row in rows:
        kinds.setdefault(row.kind, {}).setdefault(row.parameter, row)
    for kind, own in kinds.items():
        of = to.setdefault(kind, Unseen())
        of.owners += len({row.at[0] for row in rows if row.kind == kind})
        of.elements += sum(row.elements for row in own.values())
        of.names.update((row.name, None) for row in own.values())


def _site(path: str, name: str) -> str:
    return plain_name(path if name == "weight" else f"{path}.{name}".lstrip("."))


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                yield module, name, p
