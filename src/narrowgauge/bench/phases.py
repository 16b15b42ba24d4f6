"""Where a step's time goes on a GPU: a few profiled steps, every kernel put into a phase by its name.

    data         drawing tokens                           optimizer    AdamW over all tensors
    quantize     amax, scales, codes and their layouts    gemm         products of linear layers, any precision
    attention    its fused kernels                        rest         norms, activations, loss, copies
    idle         the device waited: no kernel ran between the first and the last

Names, not places, decide: the project's own kernels are known by the functions they are compiled from, generated ones
by the operations in their names (a fused cast to float8 counts as quantization even where it also normalizes). The
largest kernels are kept with the phase they were given, so that anybody can check.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from narrowgauge.bench.timing import wait
from narrowgauge.compute.kernels import fused

Kernel = tuple[str, float, float]  # name, begin, end in milliseconds
PHASES = ("data", "quantize", "gemm", "attention", "rest", "optimizer", "idle")
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|_mm_", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|cudnn.*(mha|attn)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|multi_tensor_apply|foreach", re.IGNORECASE)
_DATA = re.compile(r"random|distribution|philox", re.IGNORECASE)
# What a compiler calls the kernels into which it fused the making of a scale or a cast to eight bits.
_QUANTIZE = re.compile(r"float8|fp8|e4m3|e5m2|quantize|amax|scaled_mm|^triton_\w*(abs|clamp)\w*", re.IGNORECASE)


@cache
def own_kernels() -> frozenset[str]:
    """Names of the project's quantize kernels: every function that Triton compiles, read from their sources."""
    names = set()
    for path in Path(fused.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
                names.add(node.name)
    return frozenset(names)


def phase_of(kernel: str) -> str:
    """The phase of a kernel, by its name.

    >>> phase_of("nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_coopA_TNT")
    'gemm'
    """
    if kernel.partition("(")[0] in own_kernels():
        return "quantize"
    generated = kernel.startswith("triton_")
    for phase, pattern in (
        ("optimizer", _OPTIMIZER),
        ("data", _DATA),
        ("attention", _ATTENTION),
        ("quantize", _QUANTIZE),
        ("gemm", _GEMM),
    ):
        if pattern.search(kernel) and not (generated and phase in {"gemm", "attention"}):
            return phase
    return "rest"


def profile(step: Callable[[], object], device: torch.device, steps: int = 3) -> dict[str, Any]:
    """Milliseconds per step by phase, and the largest kernels as (name, ms, calls, phase), per step.

    They run one behind the other and profiled, so their sum may differ a little from what an unprofiled step takes.
    """
    return split(kernels_of(step, device, steps), steps)


def busy_ms(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Milliseconds per step in which any kernel or copy ran: a step's time if no host kept the device waiting."""
    return union(kernels_of(step, device, steps)) / steps


def kernels_of(step: Callable[[], object], device: torch.device, steps: int) -> list[Kernel]:
    """What ran on the device in so many steps, copies too."""
    wait(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
        # Kernels only: to follow the host as well would slow it down and leave the device waiting.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                step()
            wait(device)
        return [
            (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
            for event in profiler.events()
            if str(event.device_type).endswith("CUDA") and not is_span(event.name)
        ]


def is_span(name: str) -> bool:
    """Whether it is no kernel but a stretch of time that somebody gave a name: they hold kernels counted already.

    >>> is_span("Optimizer.step#AdamW.step"), is_span("void at::native::elementwise_kernel<2, {lambda(int)#1}>(int)")
    (True, False)
    """
    return ("#" in name and "<" not in name) or name.startswith(
        ("narrowgauge.", "ProfilerStep", "Torch-Compiled Region")
    )


def union(kernels: Sequence[Kernel]) -> float:
    """Milliseconds in which at least one of them ran.

    >>> union([("a", 0.0, 4.0), ("b", 3.0, 5.0), ("a", 9.0, 11.0)])
    7.0
    """
    took, until = 0.0, float("-inf")
    for _, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        took += max(0.0, end - max(begin, until))
        until = max(until, end)
    return took


def split(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """(name, begin, end) in ms of every kernel of so many steps, as `profile` returns it."""
    phases = dict.fromkeys(PHASES, 0.0)
    took: dict[str, tuple[float, int]] = {}
    for name, begin, end in kernels:
        ms, calls = took.get(name, (0.0, 0))
        took[name] = (ms + end - begin, calls + 1)
        phases[phase_of(name)] += end - begin
    if kernels:
        phases["idle"] = max(end for *_, end in kernels) - min(begin for _, begin, _ in kernels) - union(kernels)
    largest = sorted(took.items(), key=lambda item: -item[1][0])[:16]
    return {
        "phases": {name: round(ms / steps, 3) for name, ms in phases.items()},
        "kernels": [[name[:120], round(ms / steps, 3), calls / steps, phase_of(name)] for name, (ms, calls) in largest],
    }
