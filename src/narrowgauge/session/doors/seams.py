"""Where a running PyTorch program can be watched and changed without editing it.

Each seam is one function of torch's that every training program must pass: making an optimizer (`making`), calling a
module (`calling`), `backward` and an optimizer's step (`updating`). What stands in its place tells who listens, and all
of it can be undone.

A program may replace the same functions: whoever came last is outside, and closing takes nothing away from it. Ours
then stays where it is and tells nobody.

What is compiled must stay so: our hooks do nothing while a graph is traced, and leave no trace in it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.overridden import overridden
from narrowgauge.session.doors.unseen import unseen

_compiling = torch.compiler.is_dynamo_compiling


class Waits(Protocol):
    """Knows of calls of backward that no step was made of yet, while steps are as usual."""

    taken: bool  # they are
    backwards: int
    looks: bool  # what becomes of gradients that are set to zero behind one of them is followed
    parts: bool  # several optimizers make each step
    clears: Callable[[Any], bool]  # those of this are; returns whether nobody else need be told


class Seams:
    """What stands in the places of torch's own functions; `close()` leaves torch as it was found."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._originals: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._held: list[Any] = []
        self._resting: list[tuple[Any, str]] = []  # places of what tells nobody while seams rest
        self._stand_ins: dict[tuple[int, str], tuple[Any, Any]] = {}  # by places: ours, and what stands for it
        self._swapped: list[tuple[Any, str, Any, Any]] = []  # where it does
        self.waits: Waits | None = None
        self.telling = True
        self.resting = False  # meanwhile what `rests` tells nobody

    def close(self) -> None:
        """Undo everything, in reverse order; what the program has wrapped stays, and tells nobody."""
        self.telling = False
        self.swap_back()
        self._undo.close()

    def on_close(self, undo: Callable[..., Any], *args: Any) -> None:
        """Have `undo(*args)` called then."""
        self._undo.callback(undo, *args)

    def replace(
        self,
        owner: Any,
        name: str,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        overridable: bool = False,
        alone: bool = False,
        rests: bool = False,
        also: tuple[Any, str] | None = None,
    ) -> None:
        """Put `make(original)` in the place of `owner.name` until closed, and where it is `also` found under a name.

        Of an `overridable` function the program's `__torch_function__` may be told; of ours it is not. What stands
        `alone` asks by itself whether anybody is told: one line less in a traceback of the program's. What `rests`
        tells nobody while steps are left alone.
        """
        original, own = getattr(owner, name), name in vars(owner)
        ours = passed_over(unseen(make(original)))

        @passed_over
        @unseen
        def asking(*args: Any, **kwargs: Any) -> Any:
            # While a graph is traced nobody asks whether seams rest: it would be traced anew whenever they do or not.
            run = original if not self.telling or (rests and not _compiling() and self.resting) else ours
            if not overridable or torch.compiler.is_compiling() or not overridden(args, kwargs):
                return run(*args, **kwargs)
            with _put_back(owner, name, seam, original):
                return run(*args, **kwargs)

        seam = functools.wraps(original)(ours if alone else asking)
        if isinstance(owner, ModuleType) and not isinstance(original, FunctionType):
            seam.__qualname__ = name  # a builtin's may be that of a class; by this one a pickle finds it

        def undo(owner: Any, name: str) -> None:
            found, (_, stand_in) = getattr(owner, name), self._stand_ins.get((id(owner), name), (seam, seam))
            if found is not seam and (found is not stand_in or found is original):  # the program may put either back
                return
            if own:
                setattr(owner, name, original)
            else:  # it was inherited
                delattr(owner, name)

        self._originals[seam] = original
        places = [(owner, name)]
        if also is not None and getattr(*also) is original:  # the program may have put its own there
            places.append(also)
        self._resting += places if rests else ()
        for place in places:
            setattr(*place, seam)
            self._undo.callback(undo, *place)

    def swap(self, owner: Any, name: str, make: Callable[[Any, Any], Callable[..., Any]] | None = None) -> None:
        """Have torch's own function in the place of ours for a while, or `make(ours, torch's)`, if ours is there."""
        seam = vars(owner).get(name)
        known = self._stand_ins.get((id(owner), name))
        if known is None or known[0] is not seam:
            original = self.original(seam)
            if original is seam:
                return
            stand_in = (
                original if make is None else functools.wraps(original)(passed_over(unseen(make(seam, original))))
            )
            known = self._stand_ins[id(owner), name] = seam, stand_in
        setattr(owner, name, known[1])
        self._swapped.append((owner, name, *known))

    def swap_resting(self) -> None:
        """Have torch's own functions in all places of what tells nobody now."""
        for place in self._resting:
            self.swap(*place)

    def swap_back(self) -> None:
        """Undo each `swap`, but where the program has put its own meanwhile."""
        swapped, self._swapped = self._swapped, []
        for owner, name, seam, stand_in in swapped:
            if vars(owner).get(name) is stand_in:
                setattr(owner, name, seam)

    def is_held(self, owner: ModuleType, names: Iterable[str]) -> None:
        """What stands in `owner` under these names is what modules outside of torch may have taken by name."""
        self._held += [seam for name in names if (seam := getattr(owner, name)) in self._originals]

    def replace_where_held(self) -> None:
        """Put all that `is_held` where it was taken before: to look through all modules once takes long enough."""
        ours = {id(self.original(seam)): seam for seam in self._held}
        for name, module in sys.modules.copy().items():  # at once: another thread may import meanwhile
            if not isinstance(module, ModuleType) or name.partition(".")[0] in ("torch", "narrowgauge"):
                continue
            held = vars(module)
            for key, value in list(held.items()):
                if id(value) in ours:
                    held[key] = ours[id(value)]
                    self.on_close(_give_back, held, key, ours[id(value)], value)

    def original(self, function: Any) -> Any:
        """What stood where `function` stands now; itself if it is none of ours."""
        return self._originals.get(function, function) if isinstance(function, FunctionType) else function


def _give_back(held: dict[str, Any], key: str, ours: Any, original: Any) -> None:
    if held.get(key) is ours:
        held[key] = original


@passed_over
@contextmanager
@passed_over
def _put_back(owner: Any, name: str, ours: Any, original: Any) -> Iterator[None]:
    """Meanwhile the original is in its place, unless the program has put something there."""
    found = getattr(owner, name) is ours
    if found:
        setattr(owner, name, original)
    try:
        yield
    finally:
        if found and getattr(owner, name) is original:
            setattr(owner, name, ours)
