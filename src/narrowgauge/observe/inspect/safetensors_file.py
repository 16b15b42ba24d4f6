"""A safetensors file: eight bytes of length, a JSON header, then the tensors' bytes as they are.

Tensors are views of the mapped file, so what was read counts as this process's memory for as long as the file stays
open. It is opened anew after every `RENEW` bytes, which gives that memory back.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.observe.inspect.entry import Entry, names_an_optimizer, word

RENEW = 16 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
}


class SafetensorsFile:
    """One safetensors file, its header read and checked.

    Raises UsageError if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handed_out = 0
        self._file = self._open()
        self.notes = said_of_dump(self._file.metadata() or {})
        self.size = path.stat().st_size
        self.entries = tuple(self._entry(name) for name in self._file.keys())  # noqa: SIM118, it is no dict

    def read(self, name: str) -> Tensor:
        """One tensor, a view of the mapped file."""
        if self._handed_out > RENEW:
            self._file, self._handed_out = self._open(), 0
        tensor: Tensor = self._file.get_tensor(name)
        self._handed_out += tensor.numel() * tensor.element_size()
        return tensor

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise UsageError(
                f"{self.path} is no whole safetensors file: {_fault(self.path, str(error))}. "
                "If it was downloaded or copied, do that again."
            ) from error
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def _entry(self, name: str) -> Entry:
        part = self._file.get_slice(name)
        found = part.get_dtype()
        dtype = DTYPES.get(found)
        return Entry(
            name,
            tuple(part.get_shape()),
            word(dtype) if dtype is not None else str(found),
            optimizer=names_an_optimizer(name),
            why_not="" if dtype is not None else f"{found} has no torch dtype of one value per element",
        )


def _fault(path: Path, told: str) -> str:
    """What is wrong with a file that was refused in these words."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 + header:
        return f"it ends within its header, after {size} bytes"
    if "not fully covered" in told:
        return f"its {size} bytes are more or fewer than its header tells of"
    return f"its header is damaged ({told.removeprefix('Error while deserializing header: ')})"


def said_of_dump(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """What a file says of itself that a watched run dumped; nothing of any other file."""
    if metadata.get("narrowgauge") != "dump":
        return ()
    try:
        sites = {str(site): dict(about) for site, about in json.loads(metadata["sites"]).items()}
        kinds = Counter(f"{about['format']}, one scale per {about['one_scale_per']}" for about in sites.values())
    except (KeyError, TypeError, ValueError, AttributeError):
        return ("A dump of narrowgauge whose list of sites cannot be read.",)
    how = [f", converted to {metadata['converted_to']}"] if metadata.get("converted_to") else []
    how += [f", plain layers by {metadata['plain_layers_by']}"] if metadata.get("plain_layers_by") else []
    codes = "; ".join(f"{count} in {kind}" for kind, count in kinds.items())
    return (
        f"A dump of narrowgauge: step {metadata.get('step')} of rank {metadata.get('rank')}{''.join(how)}. Of each of "
        f"{len(sites)} sites it has the tensor (.x), its codes (.codes) and their scale (.scale): {codes}. "
        "The recipes see each .x as the operand that its name says, unless `--role` says another.",
    )
