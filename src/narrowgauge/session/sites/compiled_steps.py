"""Recorded steps of a program that compiles: how they run what it compiled, and what they cannot hear.

    compiled while it was watched    runs uncompiled, or in graphs that are made for such steps (`choice`)
    compiled before                  runs in the program's graphs, and is not seen inside
    where layers were converted      all of it does, and these layers' operators look themselves

A graph hears no hooks that come after it was made. The program's are left as they are, for the steps between; they ask
whether torch's functions are those that they were made with: while a call runs compiled, and only then, products are
not listened to. CUDA graphs, in which no operator looks, are left aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.errors import in_one_line
from narrowgauge.session.doors.compilations import Compilations, Whose
from narrowgauge.session.doors.compiled_graphs import launched
from narrowgauge.session.sites.choice import Choice
from narrowgauge.session.sites.products import Products
from narrowgauge.session.sites.said import AT_ONCE, CLOSED, CONVERTED, UNTOLD
from narrowgauge.session.sites.showing import Showing


class CompiledSteps:
    """One program's; it `HearsGraphs`.

    Args:
        compilations: what the program compiles.
        choice: how a recorded step runs it.
        products: not listened to while something runs compiled.
        shown: what was heard; told what may be missing for it.
        step: what is open in a recorded step, until it ends.
        eager: whether what is compiled may run otherwise in a recorded step, or else as ever.
        unheard: while it is open, nobody hears what the program does.

    Attributes:
        some: whether there was any of it when the latest recorded step began.
    """

    def __init__(
        self,
        compilations: Compilations,
        choice: Choice,
        products: Products,
        shown: Showing,
        step: ExitStack,
        eager: bool,
        unheard: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._compilations, self._choice, self._products, self._shown = compilations, choice, products, shown
        self._step, self._eager, self._unheard = step, eager, unheard
        self.some = self._told = False
        self._thread: int | None = None  # that the open step is recorded on
        self._launched = False  # what is compiled leaves its CUDA graphs aside, in this step
        self._whose: set[Whose] = set()  # calls have run compiled
        self._untold = False  # nobody told of them, and products were not listened to

    def choose(self) -> None:
        """A recorded step is about to begin: how it runs what is compiled."""
        self.some = self._compilations.any()
        self._choice.begin(free=self.some and self._eager and self._compilations.followed())
        self._told = self._compilations.told()
        self._thread, self._launched = threading.get_ident(), False

    def listens(self) -> bool:
        """Whether products of such a step can be listened to."""
        if self._told or self._choice.uncompiled:
            return True
        self._untold = True  # their graphs would be made anew for functions that come and go
        return False

    def begin(self) -> None:
        """It begins: from now on what is compiled runs so."""
        if self._choice.uncompiled:
            self._step.enter_context(self._compilations.eagerly())
        elif self.some:
            self._step.enter_context(launched(self._unheard))
        if self._choice.graphs:
            self._step.enter_context(self._compilations.in_graphs(self._failed))

    def end(self, *, seen: bool) -> None:
        """It ended, or all of it was `seen`."""
        self._thread = None
        if seen and (self._choice.graphs or self._choice.uncompiled):
            self._choice.ended(frozenset(self._shown.heard), self._compilations.inside())

    def compiled_runs(self, whose: Whose) -> Callable[[], None]:
        """As `HearsGraphs` says: meanwhile torch's functions are those that its graphs were made with."""
        self._whose.add(whose)
        back = self._products.aside()
        try:
            if self._thread == threading.get_ident():
                self._launch(whose)
            elif self._thread is not None and not (self._choice.graphs or inside_backward()):
                self._shown.said.say(AT_ONCE)
        except Exception as error:
            self.compiled_unheard(error)
        return back

    def compiled_unheard(self, error: Exception) -> None:
        """So is this."""
        self._shown.said.failed("a call of something compiled", error)

    def _launch(self, whose: Whose) -> None:
        """Where the step runs uncompiled, converted layers in what does not would be silent in a CUDA graph."""
        if whose == "unheard" and self._choice.uncompiled and not self._launched:
            self._launched = True
            self._step.enter_context(launched(self._unheard))

    def _failed(self, error: Exception) -> None:
        """The compiler could not make a graph for a recorded step."""
        cause = in_one_line(error)[:200]
        self._choice.refuse(f"torch could not compile them ({cause})")

    def notes(self, lacks: Callable[[], bool]) -> list[str]:
        """What cannot be heard; `lacks` says whether something was not seen at all."""
        closed: set[Whose] = {"unheard"} if self._eager else {"unheard", "followed"}
        notes = []
        if self._whose & closed and lacks():
            notes.append(CLOSED if self._eager else CONVERTED)
        if self._untold:
            notes.append(UNTOLD)
        return notes
