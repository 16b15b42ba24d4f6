"""What `doctor` looks at: the machine as frozen facts, probed once; advice is then a pure function of them.

Sources: torch for the GPUs, nvidia-smi or /proc/driver/nvidia for the driver, /proc for CPU and memory.
Nothing here fails: what cannot be found out is empty or 0.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# What makes BF16 (and so the baseline) fast on a CPU.
BF16_FLAGS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use."""

    name: str
    capability: tuple[int, int]  # CUDA compute capability, such as (9, 0)
    total_bytes: int
    free_bytes: int
    architecture: str = ""  # AMD's own name, such as "gfx942"; "" on NVIDIA


@dataclass(frozen=True)
class Choice:
    """The backend that `choose` picked for one recipe, and its reason."""

    recipe: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """Everything that advice depends on."""

    torch: str  # version, "" if torch cannot be imported
    torch_error: str = ""
    cuda: str = ""  # the CUDA version that torch was built with, "" for a CPU build
    hip: str = ""  # the ROCm version that torch was built with
    driver: str = ""  # the NVIDIA driver's version, "" if there is none
    gpus: tuple[Gpu, ...] = ()
    choices: tuple[Choice, ...] = ()
    cpu: str = ""
    threads: int = 1
    cpu_flags: frozenset[str] = field(default_factory=frozenset)
    memory_total: int = 0  # bytes
    memory_free: int = 0
    python: str = platform.python_version()


def probe() -> Machine:
    """Look at this machine."""
    name, flags = _cpu()
    total, free = _memory()
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return Machine("", str(error), driver=_driver(), cpu=name, memory_total=total, memory_free=free)
    gpus = _gpus() if torch.cuda.is_available() else ()
    return Machine(
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        driver=_driver(),
        gpus=gpus,
        choices=_choices(torch.device("cuda" if gpus else "cpu")),
        cpu=name,
        threads=torch.get_num_threads(),
        cpu_flags=flags,
        memory_total=total,
        memory_free=free,
    )


def _gpus() -> tuple[Gpu, ...]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        # "gfx942:sramecc+:xnack-" and the like; NVIDIA's properties have no such field.
        architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        capability = (properties.major, properties.minor)
        found.append(Gpu(properties.name, capability, total, free, architecture if torch.version.hip else ""))
    return tuple(found)


def _choices(device: object) -> tuple[Choice, ...]:
    import torch

    from narrowgauge.compute.kernels import choose
    from narrowgauge.compute.recipes import CATALOG

    picked = []
    for name, recipe in CATALOG.items():
        backend, reason = choose(recipe, torch.device(str(device)))
        picked.append(Choice(name, backend.name, reason))
    return tuple(picked)


def _driver() -> str:
    """The driver's version: nvidia-smi knows it, and where that is missing the kernel module says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        if found := re.search(r"\d+(\.\d+)+", answer):
            return found[0]
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


def _cpu() -> tuple[str, frozenset[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    name = values.get("model name") or platform.machine()
    return name, frozenset(values.get("flags", values.get("Features", "")).split())


def _memory() -> tuple[int, int]:
    """(total, available) bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    except (OSError, ValueError, AttributeError):
        return 0, 0
