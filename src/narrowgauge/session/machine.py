"""What a run's metadata says about the machine and the software: enough to judge its figures, no names, no paths."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from narrowgauge.observe.stats.apart import said_by

PACKAGES = ("narrowgauge", "torch", "numpy", "duckdb", "triton", "transformers", "accelerate", "lightning", "torchao")


def machine_facts(*, wake: bool = True) -> dict[str, Any]:
    """Hardware, versions and the git revision of the working directory, as they are when a program begins."""
    return {**device_facts(wake=wake), "versions": versions(), "git_revision": git_revision(Path.cwd())}


def device_facts(*, wake: bool = True) -> dict[str, Any]:
    """What the program runs on.

    To ask for a GPU's name wakes it, and a process that forks afterwards has spoilt it for its children. Unless `wake`,
    only one that the program has woken is asked.
    """
    awake = wake or torch.cuda.is_initialized()
    return {"hardware": hardware() if awake else cpu(), "emulated": not (awake and native_fp8())}


def native_fp8() -> bool:
    """Whether this process has NVIDIA FP8 hardware (compute capability 8.9 or newer)."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


def hardware() -> str:
    """The GPU's name, or the CPU's with the number of threads that torch uses."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return cpu()


def cpu() -> str:
    """The processor's name with the number of threads that torch uses."""
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'' if threads == 1 else 's'}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python, CUDA and the packages that matter here, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def git_revision(folder: Path) -> str:
    """The revision of the checkout around `folder`, with "+changes" if it differs; "" where there is none."""
    try:
        head = said_by(["git", "rev-parse", "--short", "HEAD"], folder).decode().strip()
        status = said_by(["git", "status", "--porcelain", "--branch", "-uno"], folder).decode() if head else ""
    except (OSError, subprocess.SubprocessError):
        return ""
    branch, *changes = status.splitlines() or [""]
    return (head + ("+changes" if changes else "")) if branch else ""
