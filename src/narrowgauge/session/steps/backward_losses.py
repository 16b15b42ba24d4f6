"""What `backward` is called on: the loss of a microbatch, as the program had it before a gradient scaler multiplied it.

loss * scale, or each of several by it      its loss is the one before, if backward is called on the product, at once
                                            or after that of another
scaled a + scaled b, their mean, a part     computed of products: its loss is it over the scale
scaled /= 2                                 the same, where it is
backward([a, b])                            sums the gradients of both: its loss is a + b
backward(y, gradients)                      y is no number: no loss

While the program is left alone a product is noted with as little as can be (`latest`), and looked for there first.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ReferenceType

from torch import Tensor

from narrowgauge.session.steps.returned import name_of
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.tensors.weakly import Weak, holds_briefly, weakly

NEAR = 100  # operations before a loss, among which products are looked for


class _Scaled(NamedTuple):
    """What a loss became, which is not held, nor what it was computed of: the program may never call backward on it."""

    after: Weak
    before: Tensor
    scale: float | Tensor | None
    version: int | None  # or the program has changed it since, where it is


# The same of a step that is left alone, and the node that made it.
Briefly = tuple[ReferenceType[Tensor], Tensor, float | Tensor, int, tuple[int, str]]


class BackwardLosses:
    """Those of one program; they go into the line of the open step, or of one that is left alone.

    Attributes:
        scales: whether anything was multiplied that may still be there.
        latest: what was since the last backward, in steps that are left alone; newer than all that else is known.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        holds_briefly(self)
        self.scales = False
        self.latest: list[Briefly] = []
        self._earlier: list[Briefly] = []  # what was the latest before the last backward that had any
        self._scaled: dict[int, _Scaled] = {}  # by the id of what it became
        self._products: dict[tuple[int, str], float | Tensor] = {}  # the scales of the latest, by their nodes' names
        self._waiting: dict[int, _Scaled] = {}  # of what was multiplied before the last backward, if it still is there
        self.numbers = self._vectors = 0  # microbatches with a loss, and without

    def multiplied(self, before: Any, after: Any, scale: Any) -> None:
        """A loss became another by a scale, or each of several."""
        self.hold_by_weakly()
        if isinstance(before, tuple | list) and isinstance(after, tuple | list):
            for one, scaled in zip(before, after, strict=False):
                self.multiplied(one, scaled, scale)
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            kept = scale.detach().clone() if isinstance(scale, Tensor) else scale
            version = None if after.is_inference() else after._version
            self._scaled[id(after)] = _Scaled(weakly(after), before.detach(), kept, version)
            self.scales = True
            if after.grad_fn is not None and kept is not None:
                self._product(name_of(after.grad_fn), kept)

    def forget(self) -> None:
        """A backward is over; what was multiplied and the program still has may have its own, or another."""
        if not self.scales:
            return
        earlier = self._earlier
        if self.latest:
            self._earlier, self.latest = self.latest, []
            for one in earlier:  # mostly gone: the program has another in its place
                if one[0]() is not None:
                    self._wait(one)
        elif earlier:
            self._earlier = [one for one in earlier if one[0]() is not None]
        if self._scaled or self._waiting:
            both = self._waiting | self._scaled
            self._waiting = {at: each for at, each in both.items() if each.after() is not None}
            self._scaled = {}
        if self._products:
            self._products = {}
        self.scales = bool(self._earlier or self._waiting)

    def add(self, loss: Any, *, staged: bool) -> Tensor | None:
        """A microbatch has this loss, or several; if `staged`, what is no number is the gradient of a later stage.

        Returns its number, without a scaler's scale.
        """
        number = self.number(loss)
        if number is not None:
            self.numbers += 1
            self._steps.ledger.add_microbatch(number)
        elif not staged and any(isinstance(x, Tensor) for x in (loss if isinstance(loss, tuple | list) else (loss,))):
            self._vectors += 1
            if (line := self._steps.ledger.line) is not None:
                line.vectors += 1
            self._steps.ledger.add_microbatch(None)
        return number

    def number(self, loss: Any) -> Tensor | None:
        """What it is without a scaler's scale, of several their sum; None if that is no number."""
        if type(loss) is Tensor and not self.scales:  # as it mostly is
            return loss if loss.numel() == 1 else None
        losses = [self._unscaled(each) for each in (loss if isinstance(loss, tuple | list) else (loss,))]
        tensors = [each for each in losses if isinstance(each, Tensor)]
        if not tensors or len(tensors) < len(losses) or any(each.numel() != 1 for each in tensors):
            return None
        first, *others = tensors
        if others:
            first = first.detach().float().reshape(())
        for other in others:
            first = first + other.detach().to(first).reshape(())
        return first

    def notes(self, backwards: int) -> list[str]:
        """Of how many of all backward passes there is none, if there is of others; and of how many it is in no step."""
        notes = []
        if self.numbers and self._vectors:
            notes.append(
                f"Backward was called {self._vectors} of {backwards} times on something else than numbers (gradients "
                "that are handed on, say), which adds nothing to loss: that is of the other calls alone."
            )
        if thrown := self._steps.thrown_away:
            least = "at least " if self._steps.more_thrown_away else ""
            notes.append(
                f"Gradients of {least}{thrown} {'microbatch' if thrown == 1 else 'microbatches'} were set to zero "
                "before a step was made of them; their losses and tokens are in no step."
            )
        return notes

    @staticmethod
    def estimate(loss: Any) -> bool:
        """Whether it has no number, and so nothing is trained by it: it is on the meta device."""
        if type(loss) is Tensor:
            return loss.is_meta
        losses = loss if isinstance(loss, tuple | list) else (loss,)
        return any(isinstance(each, Tensor) and each.is_meta for each in losses)

    def _unscaled(self, loss: Any) -> Any:
        if not isinstance(loss, Tensor):
            return loss
        if (known := self._known(loss)) is not None:
            before, scale = known
        elif (scale := self._made_of(loss)) is not None:
            before = loss.detach().float() / (scale.to(loss.device) if isinstance(scale, Tensor) else scale)
        else:
            return loss
        line = self._steps.line or self._steps.rest.line
        if scale is not None and line is not None:
            line.scalars["loss_scale"] = scale
        return before

    def _known(self, loss: Tensor) -> tuple[Tensor, float | Tensor | None] | None:
        """What this was before it was multiplied, and by what; None if it is no product."""
        for those in (self.latest, self._earlier):
            for after, before, scale, version, _ in reversed(those):
                if after() is loss:
                    return (before, scale) if loss._version == version else None
        scaled = self._scaled.get(id(loss)) or self._waiting.get(id(loss))
        if scaled is None or scaled.after() is not loss or scaled.version not in (None, loss._version):
            return None
        return scaled.before, scaled.scale

    def hold_by_weakly(self) -> None:
        """What was noted in brief is known as all that is multiplied where the program is not left alone."""
        earlier, latest, self._earlier, self.latest = self._earlier, self.latest, [], []
        for one in earlier:
            self._wait(one)
        for after, before, scale, version, name in latest:
            if (product := after()) is not None:
                self._scaled[id(product)] = _Scaled(weakly(product), before, scale, version)
            self._product(name, scale)

    def _wait(self, one: Briefly) -> None:
        after, before, scale, version, _ = one
        if (product := after()) is not None:
            self._waiting[id(product)] = _Scaled(weakly(product), before, scale, version)

    def _product(self, name: tuple[int, str], scale: float | Tensor) -> None:
        """A node that made one, and its scale."""
        self._products[name] = scale
        if len(self._products) > NEAR:
            del self._products[next(iter(self._products))]

    def _made_of(self, loss: Tensor) -> float | Tensor | None:
        """The scale of the product that a loss was computed of; None of what was computed of none."""
        self.hold_by_weakly()
        products = self._products
        nodes = [loss.grad_fn] if products and loss.grad_fn is not None else []
        seen = set(nodes)
        for node in nodes:
            if (name := name_of(node)) in products:
                return products[name]
            more = {each for each, _ in node.next_functions if each is not None} - seen
            if len(seen) < NEAR:
                seen |= more
                nodes.extend(more)
        return None
