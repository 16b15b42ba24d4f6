"""Joules per step, from the GPU's own counter.

    joules = (energy after - energy before) / 1000          NVML counts millijoules since the driver was loaded

The counter belongs to the whole board and moves in steps of some tens of milliseconds, so it says something over two
seconds of steps, within some percent, and nothing over one kernel. It needs the package nvidia-ml-py (the extra
`bench`) and a GPU of the Volta generation or newer; where it cannot be read, the reason is said in its place.

Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.bench.timing import wait


class EnergyMeter:
    """Reads the energy counter of one device; `reason` says why it cannot, "" if it can."""

    def __init__(self, device: torch.device) -> None:
        self.reason = ""
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            self.reason = f"no energy counter on {device.type!r}"
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self.reason = "nvidia-ml-py is not installed (pip install 'narrowgauge[bench]')"
            return
        try:
            self._nvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            self.joules()
        except Exception as error:  # NVML's own errors share no base that could be named without importing it
            self._handle = None
            self.reason = f"NVML cannot read it: {error}"

    def joules(self) -> float | None:
        """The counter in joules, None where there is none. Wait for the device before reading."""
        if self._handle is None:
            return None
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


def joules_per_call(
    meter: EnergyMeter, call: Callable[[], object], device: torch.device, ms: float, seconds: float = 2.0
) -> float | None:
    """Joules of one call that takes `ms`, over as many of them as last `seconds`; None without a counter."""
    if meter.reason:
        return None
    calls = max(3, math.ceil(1e3 * seconds / ms))
    call()
    wait(device)
    before = meter.joules()
    for _ in range(calls):
        call()
    wait(device)
    after = meter.joules()
    return None if before is None or after is None else (after - before) / calls
