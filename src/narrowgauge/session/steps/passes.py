"""How many passes over data loaders an evaluation took: what each iterator of a loader gives, one after the other.

    one that begins when the last has ended, or was left    a new pass
    when no loss came of the last one's latest batch        beside it: batches of both are for one loss
    one batch of each of the same loader's iterators        one pass
    an iterator that goes on                                its own pass: what began since lies in that

Who knows how long a loader is asks for no more, and no end is heard. Losses may come when the next batch is there.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_OPEN = 64  # iterators that have not ended, or were left


class _Open(NamedTuple):
    iterator: int
    number: int  # of its pass


class Passes:
    """Those of a program, told apart by numbers.

    Attributes:
        most: how many the evaluation that had most took, of those that are over.
    """

    def __init__(self) -> None:
        self.most = 1
        self._begun, self._over = 0, True  # passes so far, and whether the last has come to its end
        self._open: list[_Open] = []
        self._data = self._batches = 0  # whose the latest iterator's batches are, and how many came
        self._judged = False  # a loss came since the latest batch
        self._evaluates, self._first, self._took = False, 0, 1  # the open evaluation: its first pass, and how many

    def came(self, data: int, iterator: int, *, first: bool) -> None:
        """A data loader's iterator gave a batch of this data, its `first` or another."""
        before = next((each.number for each in self._open if each.iterator == iterator), None)
        if before is None or first:
            left = first and self._judged and (data != self._data or self._batches > 1)
            self._begun += self._over or left
            self._open = [each for each in self._open if each.iterator != iterator][-MOST_OPEN:]
            self._open.append(_Open(iterator, self._begun))
        else:
            self._begun = before
            while self._open[-1].iterator != iterator:
                self._open.pop()
        self._data, self._batches = data, 1 if first else self._batches + 1
        self._over = self._judged = False

    def ended(self, iterator: int) -> None:
        """One came to its end."""
        self._open = [each for each in self._open if each.iterator != iterator]
        self._over = True

    def loss(self, *, begins: bool) -> None:
        """A loss came that is an evaluation's; of one that `begins`, or of the one that is open."""
        if begins or not self._evaluates:
            self.over()
            self._evaluates, self._first = True, self._begun
        self._took = max(self._took, self._begun - self._first + 1)
        self._judged = True

    def over(self) -> None:
        """The evaluation that is open, if any is, is over."""
        self.most = max(self.most, self._took)
        self._evaluates, self._took = False, 1

    @property
    def open(self) -> bool:
        """Whether an evaluation is."""
        return self._evaluates
