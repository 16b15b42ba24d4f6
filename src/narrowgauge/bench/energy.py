"""Joules per step, from the GPU's own counter.

    joules = (energy after - energy before) / 1000          NVML counts millijoules since the driver was loaded

The counter belongs to the whole board and moves in steps of some tens of milliseconds, so a reading is worth something
over a good part of a second and nothing over one kernel. It needs the package nvidia-ml-py (the extra `bench`) and a
GPU of the Volta generation or newer; where it cannot be read, the reason is said in its place.

Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


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


class EnergyPerTurn:
    """Adds up the energy of each variant's turns; made for the hooks of `timing.interleave`."""

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self._before: float | None = None
        self._spent: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def begins(self, name: str) -> None:
        """A turn begins; the device is idle."""
        self._before = self._meter.joules()

    def ends(self, name: str) -> None:
        """The turn ended; the device is idle again."""
        after = self._meter.joules()
        if after is not None and self._before is not None:
            self._spent[name] = self._spent.get(name, 0.0) + after - self._before
            self._turns[name] = self._turns.get(name, 0) + 1

    def per_call(self, name: str, calls_per_turn: int) -> float | None:
        """Joules per call over all turns of `name`, None if nothing was read."""
        turns = self._turns.get(name, 0)
        return self._spent[name] / (turns * calls_per_turn) if turns else None
