"""One step's dump on its way to the disk: copies that may still be arriving, then one safetensors file.

    dumps/step00000120-rank0.safetensors      SITE.x      [M, K] what was quantized, in its own dtype
                                              SITE.codes  [M, K] float8
                                              SITE.scale  float32; x ≈ codes * scale
                                              SITE@1.x    the same in the step's second microbatch, and so on

A device's copies go to pinned memory behind an event; the thread that writes waits for it, training does not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from narrowgauge.compute.quant import Block, QTensor


class StepFile:
    """The tensors of one step."""

    def __init__(self, step: int, rank: int, about: dict[str, str]) -> None:
        self.step = step
        self.name = f"step{step:08d}-rank{rank}.safetensors"
        self._about = {"narrowgauge": "dump", "step": str(step), "rank": str(rank), **about}
        self.tensors: dict[str, Tensor] = {}
        self._sites: dict[str, dict[str, Any]] = {}
        self._events: list[Any] = []

    def add(self, site: str, micro: int, x: Tensor, q: QTensor) -> None:
        """Begin to copy one operand."""
        name = f"{site}@{micro}" if micro else site
        for part, tensor in (("x", x), ("codes", q.codes), ("scale", q.scale)):
            self.tensors[f"{name}.{part}"] = _copy(tensor.detach())
        if x.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(x.device))
            self._events.append(event)
        self._sites[site] = {"format": q.fmt.name, "one_scale_per": _granule(q), "microbatches": micro + 1}

    def write(self, folder: Path) -> int:
        """Wait for the copies and write the file, aside and then renamed; how many bytes it has."""
        for event in self._events:
            event.synchronize()
        folder.mkdir(parents=True, exist_ok=True)
        aside, path = folder / f".{self.name}.{os.getpid()}", folder / self.name
        try:
            aside.touch()
            mode = aside.stat().st_mode  # what the umask leaves; safetensors lets the owner alone read its file
            save_file(self.tensors, aside, {**self._about, "sites": json.dumps(self._sites)})
            aside.chmod(mode)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return path.stat().st_size


def nbytes_of(x: Tensor, q: QTensor) -> int:
    """What an operand takes in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (x, q.codes, q.scale))


def _copy(x: Tensor) -> Tensor:
    """A copy of our own in host memory: the program may overwrite what it has."""
    if not x.is_cuda:
        return x.clone(memory_format=torch.contiguous_format)
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    return host


def _granule(q: QTensor) -> str:
    if isinstance(q.granularity, Block):
        return f"{q.granularity.rows}x{q.granularity.cols}"
    return type(q.granularity).__name__.removeprefix("Per").lower()
