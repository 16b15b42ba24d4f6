"""How long do our functions take, by the clock around each, in a step that is left alone?

What blocks of steps differ by (`watch_measurable`) is, of steps of a few milliseconds, mostly where the program's own
tensors happen to lie: more than our functions take themselves. So here each of them is timed in its place, between the
program's operations, where nothing of it is in the processor's caches. What two looks at the clock take is taken off.
All are microseconds of a step: the median of a call, times the calls that a step has.

    called     torch's hook for all modules: the model is called
    begins     the model's own hook before its call
    ended      and behind it
    backward   what stands for torch.autograd.backward, without torch's
    zeroed     what stands for Optimizer.zero_grad, likewise
    stepping   torch's hook before an optimizer's step
    stepped    the one behind it: the row of the step; every sixteenth gives all of them away, which the mean has

    python -m benchmarks.watch_inside [--sizes layers-256-float32 tiny ...] [--steps 320]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import record
from benchmarks.watch_cost_cpu import NEVER
from benchmarks.watch_measurable import trained
from torch import nn
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import narrowgauge as ng
from narrowgauge.observe.stats import host
from narrowgauge.session.steps import pace

WARM = 40  # steps, of which the first are looked at
SIZES = ("layers-256-float32", "layers-512", "tiny", "layers-512-float32")


class Clock:
    """Times functions in their places, by names."""

    def __init__(self) -> None:
        self.took: dict[str, list[int]] = {}
        self._within = 0  # nanoseconds of torch's own backward

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed, without torch's backward in it."""
        took = self.took.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            found = function(*args, **kwargs)
            took.append(time.perf_counter_ns() - began - self._within)
            self._within = 0
            return found

        return timed

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's own function, whose time is not ours."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            found = function(*args, **kwargs)
            self._within = time.perf_counter_ns() - began
            return found

        return timed

    def instead_of(self, owner: Any, name: str, what: str) -> Callable[[], None]:
        """What stands there for torch's own is timed without that, until what this returns is called."""
        ours: Any = vars(owner)[name]
        cell = ours.__closure__[ours.__code__.co_freevars.index("original")]
        original, cell.cell_contents = cell.cell_contents, self.outside(cell.cell_contents)
        setattr(owner, name, self.around(what, ours))

        def undo() -> None:
            setattr(owner, name, ours)
            cell.cell_contents = original

        return undo


def row_of(name: str, steps: int) -> dict[str, Any]:
    """A program's row: microseconds of a step."""
    model, train = trained(name, "cpu")
    clock, hooks = Clock(), nn.modules.module._global_forward_pre_hooks
    with tempfile.TemporaryDirectory() as folder, ng.watch(out=Path(folder) / "run", every=NEVER):
        began = time.perf_counter()
        for _ in range(WARM):
            train()
        ms = 1e3 * (time.perf_counter() - began) / WARM
        called = clock.around("called", *hooks.values())
        undo = [clock.instead_of(torch.autograd, "backward", "backward")]
        undo.append(clock.instead_of(Optimizer, "zero_grad", "zeroed"))
        for places, what in (
            (model._forward_pre_hooks, "begins"),
            (model._forward_hooks, "ended"),
            (_global_optimizer_pre_hooks, "stepping"),
            (_global_optimizer_post_hooks, "stepped"),
        ):
            for key, hook in list(places.items()):
                places[key] = clock.around(what, hook)
        nothing = clock.around("nothing", lambda: None)
        try:
            for _ in range(steps):
                hooks.update(dict.fromkeys(hooks, called))  # ours puts itself back behind each call
                train()
                nothing()
        finally:
            for each in undo:
                each()
    nothing_took = clock.took.pop("nothing")
    own, mean_own = statistics.median(nothing_took), statistics.fmean(nothing_took)
    row: dict[str, Any] = {"program": name, "step_ms": round(ms, 2)}
    medians = {what: (statistics.median(took) - own) * len(took) / steps / 1e3 for what, took in clock.took.items()}
    row |= {what: round(us, 2) for what, us in medians.items()}
    mean = sum((statistics.fmean(took) - mean_own) * len(took) / steps / 1e3 for took in clock.took.values())
    total = sum(medians.values())
    return row | {"us": round(total, 1), "mean_us": round(mean, 1), "mean_pct": round(0.1 * mean / ms, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--steps", type=int, default=320)
    args = parser.parse_args()
    host.wait()
    pace.SETTLED = 0
    torch.set_num_threads(1)
    record("watch_inside", {"steps": args.steps, "threads": 1}, [row_of(name, args.steps) for name in args.sizes])


if __name__ == "__main__":
    main()
