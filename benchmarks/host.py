"""What a converted layer costs the host of a compiled step, in microseconds of this CPU; no GPU is used.

    launch        a kernel's: inspected by Triton each time, or looked up
    dispatch      of an operator that does nothing: with a derivative, or without
    forward, backward    a layer's operators, all of their Python, with kernels and products that do nothing
    x again              where every line has a scale, the operator between the two that casts x once more
    watched              the same while every operand is counted, and a step of one layer is begun and ended

What a GPU's driver adds, some microseconds per launch, is not in here. CPU time of the thread, the least of some
rounds: other work on the machine does not count.

    python -m benchmarks.host
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.record import record
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.compute.kernels.fused import blocks, launch, rows, tensorwise
from narrowgauge.compute.kernels.fused.backend import Fused
from narrowgauge.compute.kernels.fused.watched import blocks as counting_blocks
from narrowgauge.compute.kernels.fused.watched import rows as counting_rows
from narrowgauge.compute.kernels.fused.watched import square_errors as counting_errors
from narrowgauge.compute.kernels.fused.watched import tensorwise as counting_tensorwise
from narrowgauge.compute.kernels.fused.watched import whole_rows as counting_whole_rows
from narrowgauge.compute.kernels.fused.watched.looks import Looks
from narrowgauge.compute.nn import set_observer
from narrowgauge.compute.nn.tracing.operator import derivative_of, operator, shapes_of

SIDE, ROUNDS, CALLS = 256, 7, 1000
RECIPES = ("current", "delayed", "rowwise", "blockwise")


def microseconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        best = min(best, (time.thread_time() - began) / CALLS)
    return round(1e6 * best, 1)


class Nothing:
    """A compiled kernel that does nothing."""

    function = packed_metadata = 0

    def run(self, *args: Any) -> None:
        """Take what a launcher takes."""


class Nowhere(dict[Any, Any]):
    """Knows every kernel, each of which does nothing."""

    def get(self, key: Any, default: Any = None) -> Any:
        super().get(key)  # hashed, as a kernel that is there would be
        return Nothing()


class Idle(launch.Launch):
    """A launch of nothing."""

    __slots__ = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ready = Nowhere()


def pretend_gpu() -> None:
    """A GPU of Hopper's kind for Triton to compile for, and a stream for launches; nothing ever runs on it."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_current_target=lambda: target,
        )
    )
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    counting = (counting_blocks, counting_rows, counting_whole_rows, counting_tensorwise, counting_errors)
    for module in (launch, blocks, rows, tensorwise, *counting):
        module.Launch = Idle  # type: ignore[misc]
    launch.INTERPRETED = False  # type: ignore[misc]


class Counting:
    """An observer whose looks nobody ever packs."""

    def __init__(self) -> None:
        self.looks, self.turn = Looks(torch.device("cpu")), 0

    def wants(self, module: str) -> bool:
        """Always."""
        return True

    def look(self, module: str, role: str, x: Tensor, rule: Any, turned: bool) -> Any:
        """Room for what a kernel counts."""
        return self.looks.open(f"{module}:{role}", x, rule, self.turn, turned)

    def next_step(self) -> None:
        """What lies between two steps."""
        self.looks.clear()
        self.turn += 1

    def operand(self, *args: Any, **options: Any) -> None:
        """Nothing: kernels have counted."""

    def result(self, *args: Any) -> None:
        """Nothing: results are not this benchmark's subject."""


def launches() -> list[dict[str, Any]]:
    """One cast's launch."""
    x = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16)
    codes, number = torch.zeros(SIDE, SIDE, dtype=torch.uint8), torch.zeros(())
    tensors, sizes = (x, number, codes, None, number), (SIDE, SIDE, SIDE // 2, SIDE // 2, 1)
    constants = (2, 3, 448.0, 448.0, False, 0.0, True, False, False, 128)

    def inspected() -> None:
        tensorwise._cast.warmup(*tensors, *sizes, *constants, grid=(4,), num_warps=8)

    inspected()  # compiles it
    return [
        {"what": "launch, inspected", "us": microseconds(inspected)},
        {
            "what": "launch, looked up",
            "us": microseconds(lambda: launch.launch(tensorwise._cast, 4, tensors, sizes, constants, num_warps=8)),
        },
    ]


def dispatches() -> list[dict[str, Any]]:
    """An operator's, with the arguments of a layer's."""
    nothing = torch.zeros(0)

    def idle(x: Tensor, w: Tensor, b: Tensor | None, handle: Tensor, whole: list[int], real: list[float]) -> Tensor:
        return nothing

    def call(made: Any) -> Callable[[], object]:
        x, w = torch.zeros(4, 4), nn.Parameter(torch.zeros(4, 4))
        return lambda: made(x, w, None, x, [1, 2, 3, 4, 5, 6], [1.0, 2.0])

    made, plain = operator(idle, "benchmark_differentiable"), operator(idle, "benchmark_plain")
    shapes_of(made)(idle)
    derivative_of(made, lambda ctx, dy: None, lambda ctx, inputs, output: None)
    with torch.no_grad():
        return [
            {"what": "dispatch, with a derivative", "us": microseconds(call(made))},
            {"what": "dispatch, without", "us": microseconds(call(plain))},
        ]


def layers(recipe: str) -> list[dict[str, Any]]:
    """Both operators of a layer, as a traced graph calls them."""
    layer = nn.Linear(SIDE, SIDE, bias=False).bfloat16()
    model, _ = ng.convert(nn.Sequential(layer), recipe=recipe, backend="reference")
    state, weight = model[0]._fp8, model[0].weight
    state.backend = Fused()
    if state.table is not None:
        state.table._waiting.clear()
    x, traced = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16), state.traced
    amax = torch.ones(()) if traced.own_scale else None
    forward = torch.ops.narrowgauge.linear_forward_traced.default
    backward = torch.ops.narrowgauge.linear_backward_traced.default
    numbers = (state.handle, torch.bfloat16, True, *traced.numbers)
    with torch.no_grad():
        _, codes, mark, _, amax_w = forward(x, amax, weight, None, *numbers)
        granules = traced.granularity.scale_shape((SIDE, SIDE))
        scale = torch.ones(math.prod(granules)) if granules else mark  # where the graph makes them
        if not codes.numel():
            codes = torch.zeros(SIDE, SIDE, dtype=torch.float8_e4m3fn)
        saved = ([SIDE, SIDE], torch.bfloat16, weight, amax_w, None, codes, scale, mark, None)
        rest = (state.handle, torch.bfloat16, [True, True, False])

        def there() -> object:
            return forward(x, amax, weight, None, *numbers)

        def back() -> object:
            return backward(x, amax, *saved, *rest)

        found = [
            {"what": f"{recipe}, forward", "us": microseconds(there)},
            {"what": f"{recipe}, backward", "us": microseconds(back)},
        ]
        if traced.by_lines:
            again = torch.ops.narrowgauge.turned_codes.default
            call = partial(again, x, state.handle, *traced.numbers, SIDE)
            found.append({"what": f"{recipe}, x again", "us": microseconds(call)})
        counting = Counting()
        set_observer(model, counting)  # type: ignore[arg-type]

        def step() -> None:
            there()
            back()
            counting.next_step()

        found.append({"what": f"{recipe}, both, watched", "us": microseconds(step)})
        return found


def main() -> None:
    """Measure and record."""
    pretend_gpu()
    y = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16)
    torch._scaled_mm = lambda *operands, **options: y
    nn.functional.scaled_mm = lambda *operands, **options: y
    found = launches() + dispatches()
    for recipe in RECIPES:
        found += layers(recipe)
    record("host", {"side": SIDE, "rounds": ROUNDS, "calls": CALLS}, found)


if __name__ == "__main__":
    main()
