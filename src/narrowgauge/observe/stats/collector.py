"""The Collector looks at a step's tensors where they are and hands their metrics to a run, one step at a time.

    begin_step(7)      is it one of the watched steps (7 % every == 0)?
    look               a GPU's kernels count while they quantize, into room that this gives them
    operand, result    tallies stay on the device, one set per microbatch (of a weight, the first)
    end_step()         merge them by law, pack all sites into ONE tensor, start ONE copy to the host
    later              the copy is there: to the writer, in whose thread moments become metrics, or here if it has none

A device is never waited for: the copy goes to pinned memory and an event tells, at a later step, that it has arrived.
On the CPU it is there at once.

Watching never ends a training run: whatever goes wrong is logged once, left in the run as an event, and the numbers
concerned are missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from narrowgauge.compute.quant import QTensor
from narrowgauge.errors import in_one_line, let_pass
from narrowgauge.metrics import Site
from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.again import OPEN, Again, Gate, Watched, here, there
from narrowgauge.observe.stats.arriving import Arriving, Writer
from narrowgauge.observe.stats.device import ready
from narrowgauge.observe.stats.guard import Guard, Marks, milliseconds
from narrowgauge.observe.stats.held import Held, Table, lies_as
from narrowgauge.observe.stats.moments import strides
from narrowgauge.observe.stats.transfer import Packed

if TYPE_CHECKING:
    from narrowgauge.compute.kernels import Given
    from narrowgauge.compute.kernels.fused.watched.looks import Looks
    from narrowgauge.compute.nn import GemmSample
    from narrowgauge.compute.recipes import Operand

P = ParamSpec("P")

_CPU = torch.device("cpu")
_log = logging.getLogger("narrowgauge.stats")


@cache
def _address(module: str, role: str) -> str:
    return str(Site(module, role))


_NOTHING = nullcontext()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels of ours are launched on the current device; a program's layers may lie on several."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)


class Collector:
    """An Observer that writes every metric of every site of the watched steps.

    Args:
        writer: a `RunWriter`, or anything with its `add_tensors` and `add_event`.
        every: watch the steps that this divides; 1 watches all.
        due: says of each step whether it is watched, instead of `every`.

    Attributes:
        seconds: what watching cost so far. On the CPU the host's time in here; on a GPU, which the host runs ahead of
            and then waits for, the GPU's own time for what is launched here, known once a step's numbers have arrived;
            of one tensor of sixteen, in turn, since asking for the time costs the host as much as counting does.
            What kernels count while they quantize is in their time and not in this.
        failures: how often something went wrong and numbers are missing for it.
        by_passes: in how many watched steps passes counted on the CPU, because the compiled walk was not there.
        outlet: asked at the end of every watched step with the step and what it left on each device, whether it sees to
            the rest (and perhaps gives it back to `keep`, later or merged with that of other ranks).

    >>> collector = Collector(writer, every=10)  # doctest: +SKIP
    >>> set_observer(model, collector)  # doctest: +SKIP
    """

    def __init__(self, writer: Writer, every: int = 1, due: Callable[[int], bool] | None = None) -> None:
        self.every = max(1, int(every))
        self._due = due or (lambda step: step % self.every == 0)
        self.failures = self.by_passes = 0
        self.outlet: Callable[[int, list[Packed]], bool] | None = None
        self._writer = writer
        self._step = 0
        self._on_cpu = False  # something was watched there
        self._expected = 0  # sites that a step counts on the CPU
        self._turn = 0  # watched steps so far: which rows the histograms are taken from
        self._watched = Watched(self._failed)
        self._looks: dict[torch.device, Looks] = {}  # kept from step to step: their room stays where it is
        self._arriving = Arriving()

    @property
    def seconds(self) -> float:
        """As told above."""
        return self._watched.seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._watched.seconds = seconds

    def why_slow(self) -> str:
        """Why most watched steps took longer than those of another run will, in words; "" if they did not."""
        if 2 * self.by_passes <= self._turn or host.why_not():
            return ""
        return "most were counted by slower passes, as numba has to compile the fast walk once per installation"

    def wants(self, module: str) -> bool:
        """Whether the open step is watched; the same for every module."""
        return self._watched.open

    def begin_step(self, step: int) -> bool:
        """Open a step; True if it is watched. A step that is still open ends first."""
        self.end_step()
        if self._arriving:
            with self._guarded(None):
                self.seconds += self._arriving.hand_over(wait=False)
        self._step, self._watched.open = step, self._due(step)
        self._take_up()
        return self._watched.open

    def look(self, module: str, role: str, x: Tensor, rule: Operand, turned: bool) -> Any | None:
        """Room for what a kernel counts of an operand while it quantizes it; None where `operand` has to look."""
        if not self._watched.open:
            return None
        held = self._held_on(x.device)
        try:  # a guard would also look at the time, which on a GPU is not the host's
            return held.look(_address(module, role), role, x, rule, turned)
        except Exception as error:
            self._failed(f"{module}:{role}", error)
            return None

    def operand(
        self,
        module: str,
        role: str,
        x: Tensor,
        q: QTensor,
        moments: Tensor | None = None,
        amax_ratio: Tensor | None = None,
    ) -> None:
        """See an operand x [..., K], its codes, and its packed moments if the quantizer made them already."""
        if not self._watched.open or x.numel() == 0:
            return
        held = self._held_on(x.device)
        if x.is_cpu:
            self._here(held.operand, module, role, x, q, moments, amax_ratio)
            return
        with self._sampled(f"{module}:{role}", x.device, held):
            held.operand(_address(module, role), role, x, q, moments, amax_ratio)

    def judge(self, module: str, role: str, x: Tensor, rule: Operand, given: Given | None = None) -> bool:
        """See x [M, K] of a layer that is not converted, and what `rule` would make of it, without making that.

        False where somebody has to: then it is to be quantized and shown to `operand`. So is what has a `given` scale,
        but on a GPU.
        """
        if not self._watched.open or not x.numel():
            return False
        if x.is_cpu:
            return given is None and self._judge_here(module, role, x, rule)
        device = x.device
        held, site = self._held_on(device), _address(module, role)
        if not held.by_kernels:
            return False
        if held.is_timed():
            with self._timed(f"{module}:{role}", device, held), _current(device):
                return held.judge_there(site, role, x, rule, given)
            return True  # it went wrong, which is told: nobody else is to look
        try:  # a guard takes as long as a launch
            if device.index == torch._C._cuda_getDevice():
                return held.judge_there(site, role, x, rule, given)
            with torch.cuda.device(device):
                return held.judge_there(site, role, x, rule, given)
        except Exception as error:
            self._failed(f"{module}:{role}", error)
            return True

    def _judge_here(self, module: str, role: str, x: Tensor, rule: Operand) -> bool:
        """As `_here` does it, in one function: of a small tensor the way to the walk takes as long as the walk."""
        held = self._held_on(x.device)
        began = time.perf_counter()
        try:
            return held.judge(_address(module, role), role, x, rule)
        except Exception as error:
            self._failed(f"{module}:{role}", error)
            return True
        finally:
            with self._watched.lock:
                self.seconds += 0.0 if self._watched.on_gpu else time.perf_counter() - began

    def again(
        self,
        module: str,
        role: str,
        x: Tensor,
        rule: Operand,
        given: Given | None = None,
        *,
        came: Tensor | None = None,
        gate: Gate = OPEN,
    ) -> Again | None:
        """A shorter `judge`, in later steps too, for tensors of one site that lie in memory as the one that `came`.

        x [M, K], its matrix, was just judged by the rule. Where what is returned says False, `judge` is to be asked.
        None where there is none, or not yet.
        """
        site, once, device = _address(module, role), role == "weight", x.device
        held, came = self._watched.held.get(device), x if came is None else came
        if not self._watched.open or held is None or not came.is_contiguous():
            return None
        if x.is_cpu:
            way = host.as_before(x, rule, strides(*x.shape)) if given is None and host.ready() else None
            return None if way is None else here(self._watched, gate, site, once, came, way, rule)
        if not held.by_kernels:
            return None
        return there(self._watched, gate, site, once, came, lies_as(x, rule), rule, self._timed)

    def result(self, module: str, role: str, y: Tensor, check: GemmSample | None) -> None:
        """See a gemm's result [..., N], and the part of it that was recomputed."""
        if not self._watched.open or y.numel() == 0:
            return
        held = self._held_on(y.device)
        if y.is_cpu:
            self._here(held.result, module, role, y, check)
            return
        with self._sampled(f"{module}:{role}", y.device, held), _current(y.device):
            held.result(_address(module, role), role, y, check)

    def _here(
        self, see: Callable[Concatenate[str, str, P], bool], module: str, role: str, *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """What `see` says, guarded, on the CPU: there a `Guard` would take a third as long as all but the walk."""
        began = time.perf_counter()
        try:
            return see(_address(module, role), role, *args, **kwargs)
        except Exception as error:
            self._failed(f"{module}:{role}", error)
            return True
        finally:
            self._spent(time.perf_counter() - began)

    def end_step(self) -> None:
        """Merge and pack what the step left, start its copy to the host, and write what has arrived."""
        if not self._watched.open:
            return
        self._watched.open = False
        self._turn += 1
        held_by = dict(self._watched.held)
        self._watched.held.clear()
        packed: list[Packed] = []
        for device, held in held_by.items():
            packed += self._pack(device, held)
        with self._guarded(None):
            if self.outlet is None or not self.outlet(self._step, packed):
                self.keep(packed)
            self.seconds += self._arriving.hand_over(wait=False)

    def drop_step(self) -> None:
        """Forget what the open step left: it was none."""
        self._watched.open = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was seen in the open step so far: it was none of it."""
        self._looks = {}
        self._take_up()

    def _take_up(self) -> None:
        """Begin with nothing; on the CPU at once, or the first tensor there had to go the whole way."""
        self._watched.held.clear()
        if self._watched.open and self._on_cpu:
            with self._guarded(None):
                self._held_on(_CPU)

    def keep(self, packed: Sequence[Packed], writer: Writer | None = None) -> None:
        """Start the way to the host of what a step left, and write it there (to another writer, if one is given)."""
        self._arriving.start(packed, writer or self._writer)

    def guard(self, failed: Callable[[Exception], None]) -> Guard:
        """For what is done for watching elsewhere: counted in `seconds`, its exceptions given to `failed` alone."""
        return Guard(self._spent, failed)

    def account(self, marks: Marks) -> None:
        """Count the time of a device between marks that it has passed."""
        self.seconds += milliseconds(marks) / 1e3

    def flush(self) -> None:
        """End the open step and wait until everything watched is with the writer."""
        self.end_step()
        with self._guarded(None):
            self.seconds += self._arriving.hand_over(wait=True)

    def _pack(self, device: torch.device, held: Held) -> list[Packed]:
        operands: Table = ([], None)
        results: Table = ([], None)
        with self._guarded(None, device, held), _current(device):
            self._expected = held.counted or self._expected
            operands = held.operands(self._looks.get(device))
            results = held.results()
        return [Packed(self._step, operands, results, held.marks)] if operands[0] or results[0] else []

    def _held_on(self, device: torch.device) -> Held:
        held = self._watched.held.get(device)
        if held is not None:
            return held
        if device.type == "cpu":
            self._on_cpu = True
            self.by_passes += not host.prepare()  # out here, because loading it is not what watching costs
        self._watched.on_gpu |= device.type == "cuda"
        with self._watched.lock:
            held = Held(
                self._turn,
                self._expected,
                partial(self._looks_on, device),
                by_kernels=ready(device),
                lock=self._watched.lock,
            )
            return self._watched.held.setdefault(device, held)

    def _looks_on(self, device: torch.device) -> Looks:
        if device not in self._looks:
            from narrowgauge.compute.kernels.fused.watched.looks import Looks  # triton is slow to import

            self._looks[device] = Looks(device)
        return self._looks[device]

    def _guarded(self, site: str | None, device: torch.device | None = None, held: Held | None = None) -> Guard:
        return Guard(self._spent, partial(self._failed, site), device, held.marks if held else None)

    def _sampled(self, site: str, device: torch.device, held: Held) -> Guard:
        """For one of many, of which some tell the GPU's time for all."""
        return self._timed(site, device, held) if held.is_timed() else Guard(self._spent, partial(self._failed, site))

    def _timed(self, site: str, device: torch.device, held: Held) -> Guard:
        return Guard(self._spent, partial(self._failed, site), device, held.marks, held.times)

    def _spent(self, seconds: float) -> None:
        with self._watched.lock:
            self.seconds += 0.0 if self._watched.on_gpu else seconds

    def _failed(self, site: str | None, error: Exception) -> None:
        let_pass(error)
        self.failures += 1
        if self.failures > 1:
            return
        where = site or f"the end of step {self._step}"
        cause = in_one_line(error)
        message = f"watching {where} failed at step {self._step}: {cause}"
        _log.warning(
            "narrowgauge: %s. Training goes on; the numbers of what fails are missing, and further failures are only"
            " counted.", message,
        )  # fmt: skip
        with suppress(Exception):  # the writer may be what failed
            self._writer.add_event(self._step, "watch_failed", message, site)
