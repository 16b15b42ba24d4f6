"""What is remembered of one of a program's models: its names, and who it belongs to. It is not held."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import Tensor, nn

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
        self.look(model)
        self.module = ref(model, lambda _: gone(self))

    def look(self, model: nn.Module) -> None:
        """See what it has by now."""
        owners = (name for name, m in model.named_modules() if m._parameters)
        self.layers = frozenset(map(plain_name, owners))
        self.parts = {id(m) for m in model.modules()}
        self.changed = False  # a part of it got another part since

    def beside(self, other: Model) -> bool:
        """Whether their names differ anyhow: both are parts of one module, or stages that share none."""
        if self.stage is not None and other.stage is not None and self.layers.isdisjoint(other.layers):
            return True
        return bool(self.own and other.own) and self.holder() is other.holder()

    def parameters(self) -> dict[int, Tensor]:
        """Its parameters by id; none if it is gone."""
        model = self.module()
        return {} if model is None else {id(p): p for p in model.parameters()}
