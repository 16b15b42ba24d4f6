"""The outermost call of a model that runs: what it is of, and what has to be undone when it ends.

A call that a KeyboardInterrupt has left ends without a word: torch tells hooks of an Exception alone. A notebook goes
on after it, so whether the outermost call still runs is looked up where that matters.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from torch.utils.hooks import RemovableHandle

from narrowgauge.session.models.frames import innermost_call, left_by_an_error, still_runs
from narrowgauge.session.models.root import Root


class Running:
    """The call that runs, if one does.

    Args:
        deaf: called with True where calls of modules need not be heard, because a model is called that they are parts
            of, and with False where they do again.

    Attributes:
        depth: how many calls of models are in each other; 0 where none runs.
        root: what the outermost is of.
        training: it is a step's forward with gradients.
        teaches: it is of what is frozen.
        refers: it is without gradients, on a batch that trains.
        alone: it is of a step that is left alone.
        inside: hears its end, where what is called is inside of what `root` tells of.
        call: torch's; None where a compiled function is called.
        rerouted: takes back what `first_call.reroute` did.
    """

    def __init__(self, deaf: Callable[[bool], None]) -> None:
        self._deaf = deaf
        self.depth = 0
        self.root: Root | None = None
        self.training = self.teaches = self.refers = self.alone = False
        self.inside: RemovableHandle | None = None
        self.rerouted: Callable[[], None] | None = None
        self.call: FrameType | None = None

    def of(self, root: Root) -> None:
        """The outermost call is one of this."""
        self.call, self.root = innermost_call(), root
        self._deaf(True)

    def refused(self) -> None:
        """It is left by what we raise: the program is asked to stop."""
        self.depth = 0
        self._deaf(False)

    def lost(self) -> bool:
        """Whether it was left without a word."""
        return self.depth > 0 and self.call is not None and not still_runs(self.call)

    def raised(self) -> bool:
        """Whether the error that is being handled came out of it."""
        return self.call is not None and left_by_an_error(self.call)

    def over(self) -> None:
        """It has ended."""
        self.call = self.root = None
        self._deaf(False)
        self.training = self.teaches = self.refers = self.alone = False
        if self.rerouted is not None:
            self.rerouted()
        if self.inside is not None:
            self.inside.remove()
            self.inside = None
