"""What models are given within one call of a compiled function, where that runs uncompiled: in recorded steps.

    loss(x, y)               counts as one call's: x
    model(x) - model(y)      what is in it counts as two: x and y

In its graphs nobody hears of its calls, and so `tokens` has the first number in all steps. Where the second is another,
a note tells both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.hearing import Hearing, heard
from narrowgauge.session.models.root import Root
from narrowgauge.session.tensors.batches import Batches


class InnerCalls:
    """Those of one call at a time, until one was told of.

    Args:
        hearing: the session's.
        learns: whether what is called now is called with gradients.
    """

    def __init__(self, hearing: Hearing, learns: Callable[[], bool]) -> None:
        self.hearing, self._learns = hearing, learns
        self._hooks: list[RemovableHandle] = []
        self._batches: Batches | None = None  # as the step's were before the function's call
        self._outer = self._tokens = self._calls = self._depth = 0
        self._told = 0, 0, 0

    def begin(self, roots: Sequence[Root], batches: Batches, tokens: int) -> None:
        """A compiled function is called, with so many `tokens`, and runs uncompiled: these may be called in it."""
        self.end(whole=False)
        if any(self._told):
            return
        self._batches, self._outer = batches.before_the_last(), tokens
        self._tokens = self._calls = self._depth = 0
        for root in roots:
            self._follow(root)

    def end(self, *, whole: bool) -> None:
        """The call is over; the `whole` of it, or it was left by an error."""
        hooks, self._hooks, self._batches = self._hooks, [], None
        for hook in hooks:
            hook.remove()
        if whole and hooks and self._calls > 1 and self._tokens != self._outer:
            self._told = self._calls, self._tokens, self._outer

    def _follow(self, root: Root) -> None:
        @passed_over
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._begins(root, args, kwargs)

        @passed_over
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._ended(output)

        self._hooks += [
            root.module.register_forward_pre_hook(before, with_kwargs=True),
            root.module.register_forward_hook(after, always_call=True),
        ]

    @heard
    def _begins(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or self._batches is None or not self._counts(root):
            return
        self._calls += 1
        self._tokens += self._batches.see((args, kwargs), model=id(root), width=root.width)

    @heard
    def _ended(self, output: Any) -> None:
        self._depth -= 1
        if not self._depth and self._batches is not None:
            self._batches.made(output)

    def _counts(self, root: Root) -> bool:
        return self._learns() and not inside_backward() and not root.frozen()

    @property
    def notes(self) -> list[str]:
        """What `tokens` lacks, or has too many."""
        calls, inner, outer = self._told
        if not calls:
            return []
        return [
            f"A compiled function called models {calls} times in one call of its own, and gave them {inner} tokens or "
            "samples, as a recorded step showed that ran uncompiled. In its graphs nobody hears of these calls: "
            f"tokens, and tokens_per_second, count what it is given as one call's, {outer} there."
        ]
