"""A step under the watch: of layers of ours by the door that they have, of a peer's as a session looks at foreign ones.

A recorded step of a peer's layers runs uncompiled, as in a session: a compiled graph hears no hooks that come later.
Of CUDA graphs a recorded step of ours is launched kernel by kernel.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from narrowgauge.bench.variants import Stepper
from narrowgauge.compute.nn import set_observer
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.doors.compiled_graphs import launched
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
            compiles = stepper.mode != "eager"
            self.sites = PlainSites("current", eager=True, training=lambda: True, compiles=lambda: compiles)
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
            self.sites.end()
        self.collector.end_step()

    def close(self) -> None:
        """Write what is still held, and end the run."""
        self.collector.flush()
        self.writer.close()
