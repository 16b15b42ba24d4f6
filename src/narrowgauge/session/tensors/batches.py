"""What a program feeds its models: hashed, so that two runs can be told to have seen the same, and counted.

What a model made is no data: a picture goes from generator to discriminator, and differs as soon as weights do. It is
known by its storage, which `detach`, views and reshaping share; a copy of it (`torch.cat`) counts as data. What has its
shape and comes in its place, behind something else, is the state that a model begins with, and tells nothing of that. A
batch that wants a gradient itself is counted, if there is no other, and not hashed: it may have moved by gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from narrowgauge.session.tensors.counting import Given, Width, beside_made, count, count_listed, is_one
from narrowgauge.session.tensors.fingerprint import Chained, chain
from narrowgauge.session.tensors.given import GivenBefore, Kept, version_of
from narrowgauge.session.tensors.sharded import here
from narrowgauge.session.tensors.storage import storage_of

MOST_STATES = 64  # places and shapes of what models made, that they are given again
ROOM = 16  # tensors that models made, beyond twice as many as live
Known = dict[tuple[int, int, int, int | None], StorageWeakRef]  # which holds the memory's address, not the memory
_EMPTY = frozenset((type(None), bool, int, float, str))  # of these nothing has to be asked


def _unknown() -> None:
    """Of no model."""


class Batches:
    """Every batch of a program so far; `digest` is None before the first."""

    def __init__(self) -> None:
        self.digest: Chained | None = None
        self._before = GivenBefore()
        # A storage's address is not used again while somebody holds a weak reference to it.
        self._made: dict[int, StorageWeakRef] = {}
        self._room = ROOM
        self._states: set[tuple[int, int, torch.Size]] = set()  # model, place and shape of a row
        self._given: set[int] = set()
        self._last: dict[int, StorageWeakRef] = {}  # what was given last, as far as somebody still has it
        self._unread: set[str] = set()
        self._closed: set[str] = set()
        self._units: set[str] = set()  # what was counted: "tokens", "samples"
        self._counted: list[int] = []  # whose calls counted any, in the open step
        self._latest = 0  # how many these were before the last call
        self._hashes = True

    def facts(self) -> dict[str, str]:
        """What `tokens` counts; nothing before there were any."""
        return {"counted": " and ".join(sorted(self._units, reverse=True))} if self._units else {}

    @property
    def notes(self) -> list[str]:
        """What the digest says nothing about; empty if it covers every input."""
        notes = []
        if self._unread:
            kinds = " and ".join(sorted(self._unread))
            notes.append(
                f"Some inputs are {kinds} tensors, which are not hashed: whether the runs saw the same ones is not "
                "known."
            )
        if self._closed:
            kinds = " and ".join(sorted(self._closed))
            notes.append(f"Some inputs are objects ({kinds}), whose tensors are not found: they count no tokens.")
        return notes

    def before_the_last(self) -> Batches:
        """As these were before the last call was seen, for another look at what was given in it."""
        found = Batches()
        found._before = self._before.before_the_last()
        found._made = dict(self._made)
        found._states = self._states
        found._hashes = False
        found._counted = self._counted[: self._latest]
        return found

    def begin_anew(self) -> None:
        """A step begins, or what the open one was given is thrown away."""
        self._before.begin_anew()
        self._counted, self._latest = [], 0

    def take_back(self) -> None:
        """The call that was seen last was left by an error."""
        self._before.take_back()
        del self._counted[self._latest :]

    def see(self, inputs: Any, *, more: bool = False, model: int = 0, width: Width = _unknown) -> int:
        """A `model`'s call begins with these; returns the tokens in them (samples, if no input is token ids).

        Or they are `more` inputs of a call that was seen already: then they add tokens only if it had none. What the
        step has given another model counts there (given.py). What token ids are is said in counting.py, as is how
        the model's `width` tells one sample from many.
        """
        before = self._given if more else set()
        self._latest = self._latest if more else len(self._counted)
        found = _tensors(inputs)
        if not found:
            self._closed |= {type(x).__name__ for x in tree_leaves(inputs) if hasattr(x, "__dict__")}
        data = self._data(found, before, model, hashed=self._hashes)
        if self._before.to_another(data or found, self._last, model) or before:
            return 0
        listed = None if len(found) < 2 else count_listed(*_first(inputs), data)
        counted, are_ids = listed or count(found, self._but_states(data, model))
        if not are_ids and counted > 1 and is_one(data, width):
            counted = 1
        if not are_ids and beside_made(found, data) and any(other != model for other in self._counted):
            return 0  # masks, angles: what they are given beside was counted where it came in
        if counted:
            if model not in self._counted:
                self._counted.append(model)
            self._units.add("tokens" if are_ids else "samples")
        return counted

    def met(self, inputs: Any, model: int) -> None:
        """The same, where neither how many these are nor their hash is asked."""
        found = _tensors(inputs)
        self._before.to_another(self._data(found, set(), model, hashed=False) or found, self._last, model)

    def _data(self, found: list[Given], before: set[int], model: int, *, hashed: bool) -> list[Given]:
        """What is neither made by a model nor moved by gradients, and can be counted; `before` was given already."""
        self._given, self._last = set(before), {}
        data: list[Given] = []
        for given in found:
            x = given.x
            storage, dense = storage_of(x), _dense(x)
            if storage is not None:
                given.memory = storage._cdata
                self._given.add(given.memory)
                self._last[given.memory] = StorageWeakRef(storage)
            if x.requires_grad:
                continue
            if not dense:
                self._unread.add(_kind(x))
            if given.memory in self._made:
                if given.at and len(self._states) < MOST_STATES:
                    self._states.add((model, given.at, x.shape[1:]))
                continue
            if dense and hashed:
                self.digest = chain((x,), self.digest)
            if dense or (x.is_nested and not x.is_meta):
                data.append(given)
        return data

    def _but_states(self, data: list[Given], model: int) -> list[Given]:
        """These without a state that this model begins with: it made others, which it was given in its place."""
        if not self._states or len(data) < 2:
            return data
        return [each for each in data if (model, each.at, each.x.shape[1:]) not in self._states] or data

    def again(self, inputs: Any) -> bool:
        """Whether any of these was among the inputs of the last call."""
        addresses = [_address(given.x) or 0 for given in _tensors(inputs)]
        return any((kept := self._last.get(address)) and not kept.expired() for address in addresses)

    def came(self, inputs: Any) -> None:
        """These are given in a call of which nothing else is asked than whether the next has any of them."""
        storages = [storage_of(given.x) for given in _tensors(inputs)]
        self._last = {storage._cdata: StorageWeakRef(storage) for storage in storages if storage is not None}

    def recall(self, given: Sequence[Kept], last: int, model: int) -> None:
        """What the open step was given by calls of this model of which nobody was told: by the latest from `last` on.

        Of the step before, if there was none in this.
        """
        self.begin_anew()
        self._before.recall(given, model)
        living = [storage for known, *_ in given[last:] if (storage := known()) is not None]
        self._last = {storage._cdata: StorageWeakRef(storage) for storage in living}

    def is_made(self, storage: UntypedStorage) -> bool:
        """Whether what a model returned lies in this."""
        return storage._cdata in self._made

    def trains(self, inputs: Any) -> bool:
        """Whether the open step was given all of these, as they are now."""
        return self._before.has(known_by(inputs))

    def made(self, output: Any, inputs: Any = None) -> None:
        """A model's call returned this: the last that was seen, or one with these. What passed through stays data."""
        passed = self._given
        if inputs is not None:
            passed = {address for given in _tensors(inputs) if (address := _address(given.x)) is not None}
        storages = [storage_of(given.x) for given in _tensors(output)]
        self.made_in([each for each in storages if each is not None and each._cdata not in passed])

    def made_in(self, storages: Iterable[UntypedStorage]) -> None:
        """What models returned lies in these."""
        self._made.update((storage._cdata, StorageWeakRef(storage)) for storage in storages)
        if len(self._made) > self._room:  # what was freed is forgotten whenever it may be as much as what lives
            self._made = {address: kept for address, kept in self._made.items() if not kept.expired()}
            self._room = ROOM + 2 * len(self._made)


def known_by(inputs: Any) -> Known:
    """What tells a batch from others: memory, what of it, and how often it was written. It is not kept alive."""
    known: Known = {}
    for given in _tensors(inputs):
        storage = storage_of(given.x)
        if storage is not None:
            key = storage._cdata, int(given.x.storage_offset()), given.x.numel(), version_of(given.x)
            known[key] = StorageWeakRef(storage)
    return known


def moves(inputs: Any) -> bool:
    """Whether anything in there wants a gradient."""
    return any(given.x.requires_grad for given in _tensors(inputs))


def _first(inputs: Any) -> tuple[str, Any]:
    """What a call is given first, but for objects (its own, a model), and its name, if it is given by that."""
    if type(inputs) is not tuple or len(inputs) != 2 or type(inputs[1]) is not dict:
        return "", None
    args, kwargs = inputs
    for name, given in (*(("", x) for x in args), *kwargs.items()):
        if isinstance(given, Tensor | list | tuple | dict):
            return name, given
    return "", None


def _tensors(held: Any) -> list[Given]:
    """All tensors in there; what is no container of torch's is only looked into where there are no others."""
    if type(held) is Tensor:
        return [Given("", 0, held)]
    if type(held) is tuple and len(held) == 2 and type(held[1]) is dict and not held[1] and type(held[0]) is tuple:
        placed: list[Given] = []  # as mostly: by place alone, and nothing else
        for x in held[0]:
            if type(x) is not Tensor:
                break
            placed.append(Given("", len(placed), x))
        else:
            if placed:
                return placed
    found = _leaves(held, [], "")
    if not found:
        for leaf in tree_leaves(held):
            _leaves(_inside(leaf), found, "")
    return found


def _leaves(held: Any, found: list[Given], name: str) -> list[Given]:
    """`found`, and the tensors in there; torch's own search, in a fifth of the time for what it mostly meets."""
    kind = type(held)
    if kind is Tensor:
        found.append(Given(name, len(found), held))
    elif kind is tuple or kind is list:
        for x in held:  # without a call for each tensor, or for keywords where there are none
            if type(x) is Tensor:
                found.append(Given(name, len(found), x))
            elif type(x) is not dict or x:
                _leaves(x, found, name)
    elif kind is dict:
        for key, x in held.items():
            _leaves(x, found, str(key))
    elif isinstance(held, Tensor):
        found.append(Given(name, len(found), here(held)))
    elif kind not in _EMPTY:
        for x in tree_leaves(held):
            if isinstance(x, Tensor):
                found.append(Given(name, len(found), here(x)))
    return found


def _inside(x: Any) -> Any:
    if is_dataclass(x) and not isinstance(x, type):
        return {field.name: getattr(x, field.name, None) for field in fields(x)}
    if isinstance(x, dict):  # what it gives when it is asked for an item may be the program's to make
        return dict(dict.items(x))
    return dict(x) if isinstance(x, Mapping) else None


def _dense(x: Tensor) -> bool:
    """Whether a tensor's bits can be read one by one."""
    return x.layout is torch.strided and x.device.type != "meta" and not x.is_nested


def _kind(x: Tensor) -> str:
    """What a tensor is that is not dense."""
    if x.is_nested:
        return "nested"
    return "meta" if x.device.type == "meta" else str(x.layout).removeprefix("torch.")


def _address(x: Tensor) -> int | None:
    """What tells storages apart; None for tensors that have none, such as sparse ones, of which `notes` tell."""
    storage = storage_of(x)
    return None if storage is None else int(storage._cdata)
