"""A step under the watch: of layers of ours by the door that they have, of a peer's as a session looks at foreign ones.

A peer's recorded steps have graphs of their own where it is compiled, as a session's have once they pay; the first runs
uncompiled and shows what there is to be seen. Of CUDA graphs a recorded step of ours is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from narrowgauge.bench.variants import Stepper
from narrowgauge.compute.nn import set_observer
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.doors import recorded_graphs
from narrowgauge.session.doors.compilations import Compilations
from narrowgauge.session.doors.compiled_graphs import launched
from narrowgauge.session.sites.choice import Choice
from narrowgauge.session.sites.plain_sites import PlainSites


class Watched:
    """A stepper whose every `every`-th step is recorded into `folder`."""

    def __init__(self, stepper: Stepper, every: int, folder: Path) -> None:
        self.stepper = stepper
        self.writer = RunWriter(folder, {})
        self.collector = Collector(self.writer, every=every)
        self.steps = 0
        self.sites: PlainSites | None = None
        if stepper.variant.peer is None:
            set_observer(stepper.model, self.collector)
        else:
            self.sites = PlainSites(
                "current",
                eager=True,
                training=lambda: True,
                compilations=_Loss(stepper),
                choice=Choice("graphs"),
            )
            self.sites.add(stepper.model, self.collector)

    def __call__(self) -> None:
        """One training step, watched."""
        self.steps += 1
        recorded = self.collector.begin_step(self.steps)
        if self.sites is not None and recorded:
            self.sites.begin()
        with launched() if recorded and self.sites is None else nullcontext():
            self.stepper()
        if self.sites is not None and recorded:
            self.sites.end(seen=True)
        self.collector.end_step()

    def close(self) -> None:
        """Write what is still held, and end the run."""
        self.collector.flush()
        self.writer.close()


class _Loss(Compilations):
    """What a stepper compiles: the function of its loss."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def any(self) -> bool:
        """Whether it does."""
        return self._stepper.mode != "eager"

    def eagerly(self) -> AbstractContextManager[object]:
        """Meanwhile it runs uncompiled."""
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance

    @contextmanager
    def in_graphs(self, failed: Callable[[Exception], None]) -> Iterator[None]:
        """Meanwhile it runs in graphs of recorded steps."""
        compiled = self._stepper.loss_of

        def call(*args: Any) -> Any:
            return recorded_graphs.run(compiled, args, {}, failed)

        self._stepper.loss_of = call
        try:
            yield
        finally:
            self._stepper.loss_of = compiled
