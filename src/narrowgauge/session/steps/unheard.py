"""Evaluations without a loss that anybody hears: one that a program computes by hand of what its model returned.

A model in evaluation mode is called without gradients, a data loader gives a batch, the model is called so again, and
no loss was heard since the last step. Between two steps' batches a program may as well generate samples, or ask the
model for a reference: there no batch comes between calls, or one with gradients does.
"""

from __future__ import annotations


class Unheard:
    """Counts the calls of such evaluations."""

    def __init__(self) -> None:
        self._calls = self._since = 0  # in all; since the model was called with gradients, or stepped
        self._loss = False  # one was heard since
        self._came = self._evaluated = False  # a batch behind a call; and a call behind that

    def called(self) -> None:
        """A model in evaluation mode is called without gradients."""
        self._since += 1
        self._evaluated |= self._came

    def data(self) -> None:
        """A data loader gave a batch, or has no more."""
        self._came = self._since > 0

    def loss(self) -> None:
        """A loss was heard without gradients, or is told of otherwise."""
        self._loss = True

    def over(self, *, taught: int = 0) -> None:
        """What comes now is of no evaluation that was, nor were so many calls: a teacher's."""
        self._since = max(0, self._since - taught)
        if not (self._since or self._loss or self._came):  # as mostly
            return
        self._calls = self._in_all()
        self._since, self._loss, self._came, self._evaluated = 0, False, False, False

    def _in_all(self) -> int:
        return self._calls + (self._since if self._evaluated and not self._loss else 0)

    @property
    def notes(self) -> list[str]:
        """Why there is no number of them."""
        calls = self._in_all()
        if not calls:
            return []
        return [
            f"{calls} calls of models in evaluations, on batches of data loaders, had no loss that is heard (they "
            "returned none, and none of torch's loss functions was called on what they did): eval_loss has nothing of "
            "what the program computes by hand, or in a compiled graph."
        ]
