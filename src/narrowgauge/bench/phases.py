"""Where a step's time goes on a GPU: one profiled step, every kernel put into a phase by its name.

    data         drawing tokens                           optimizer    AdamW over all tensors
    quantize     amax, scales, codes and their layouts    gemm         products of linear layers, any precision
    attention    its fused kernels                        rest         norms, activations, loss, copies
    idle         the device waited: step - sum of all kernels

Names, not places, decide: the project's own kernels are known by the functions they are compiled from, generated ones
by the operations in their names (a fused cast to float8 counts as quantization even where it also normalizes). The
largest kernels are kept with the phase they were given, so that anybody can check.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

PHASES = ("data", "quantize", "gemm", "attention", "rest", "optimizer", "idle")
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|_mm_", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|cudnn.*(mha|attn)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|multi_tensor_apply|foreach", re.IGNORECASE)
_DATA = re.compile(r"random|distribution|philox", re.IGNORECASE)
# What a compiler calls the kernels into which it fused the making of a scale or a cast to eight bits.
_QUANTIZE = re.compile(r"float8|fp8|e4m3|e5m2|quantize|amax|scaled_mm|^triton_\w*(abs|clamp)\w*", re.IGNORECASE)


@cache
def own_kernels() -> frozenset[str]:
    """Names of the project's quantize kernels, found where they are defined."""
    if importlib.util.find_spec("triton") is None:
        return frozenset()
    package = importlib.import_module("narrowgauge.compute.kernels.fused")
    names = set()
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        for name, value in vars(module).items():
            if type(value).__name__ in {"JITFunction", "Autotuner", "InterpretedFunction"}:
                names.add(getattr(value, "__name__", name))
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


def profile(step: Callable[[], object], device: torch.device, step_ms: float) -> dict[str, Any]:
    """Milliseconds of one step by phase, and its largest kernels as (name, ms, calls, phase).

    `step_ms` is what the step takes unprofiled; what no kernel accounts for is `idle`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize(device)
    took: dict[str, tuple[float, int]] = {}
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("narrowgauge."):
            ms, calls = took.get(event.name, (0.0, 0))
            took[event.name] = (ms + event.self_device_time_total / 1e3, calls + 1)
    return split(took, step_ms)


def split(took: dict[str, tuple[float, int]], step_ms: float) -> dict[str, Any]:
    """Kernel name -> (ms, calls) of one step, as `profile` returns it."""
    phases = dict.fromkeys(PHASES, 0.0)
    for name, (ms, _) in took.items():
        phases[phase_of(name)] += ms
    phases["idle"] = max(0.0, step_ms - sum(phases.values()))
    largest = sorted(took.items(), key=lambda item: -item[1][0])[:16]
    return {
        "phases": {name: round(ms, 3) for name, ms in phases.items()},
        "kernels": [[name[:120], round(ms, 3), calls, phase_of(name)] for name, (ms, calls) in largest],
    }
