"""What is remembered of one of a program's models: its names, and who it belongs to. It is not held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import ref

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgauge.session.sites.census import plain_name
from narrowgauge.session.tensors.sharded import class_name


class Model:
    """A model that was taken, as long as it lives; `own` is its name in `holder`, if it is a part of another module.

    `stage` is its number in a pipeline, if it was called in one.
    """

    def __init__(
        self, model: nn.Module, gone: Callable[[Model], None], holder: nn.Module, own: str, stage: int | None
    ) -> None:
        self.kind, self.prefix, self.stage = class_name(model), "", stage
        self.holder, self.own = ref(holder), plain_name(f"{own}.") if own else ""
        self.elements = 0  # of its parameters, as far as they were counted as its own
        self.parts: set[int] = set()
        self._left_alone: set[int] = set()  # parts that came later and do not train: a teacher, say
        self.times = 0  # that something came later
        self.look(model)
        self.module = ref(model, lambda _: gone(self))

    def look(self, model: nn.Module) -> None:
        """See what it has by now."""
        owners = (name for name, m in model.named_modules() if m._parameters)
        self.layers = frozenset(map(plain_name, owners))
        later = bool(self.parts)
        if later:
            self._left_alone.update(id(m) for m in _added(model, self.parts) if not _trains(m))
        self.parts = {id(m) for m in model.modules()}
        # A part of it got another part since, or one that came later has still to make its parameters.
        self.changed = later and any(is_lazy(p) for p in model.parameters())

    def left_alone(self, model: nn.Module) -> list[str]:
        """The names of parts that came later and do not train."""
        named = model.named_modules() if self._left_alone else ()
        return [name for name, m in named if id(m) in self._left_alone and not _trains(m)]

    def beside(self, other: Model) -> bool:
        """Whether their names differ anyhow: both are parts of one module, or stages that share none."""
        if self.stage is not None and other.stage is not None and self.layers.isdisjoint(other.layers):
            return True
        return bool(self.own and other.own) and self.holder() is other.holder()

    def parameters(self) -> dict[int, Tensor]:
        """Its parameters by id; none if it is gone."""
        model = self.module()
        return {} if model is None else {id(p): p for p in model.parameters()}


def _added(module: nn.Module, known: set[int]) -> Iterator[nn.Module]:
    """The outermost parts that are not among those known."""
    for child in module.children():
        if id(child) in known:
            yield from _added(child, known)
        else:
            yield child


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
