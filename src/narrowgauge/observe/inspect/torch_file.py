"""A torch checkpoint: nested dicts of tensors, read without running anything that the file says.

    torch.load(weights_only=True)    rebuilds tensors and plain containers; any other name in the pickle is refused,
                                     but those of numpy's scalars (numpy_scalars.py)
    mmap=True                        storages are views of the mapped file: reading a tensor reads only its own bytes

An optimizer is known by its form, a dict with `state` and `param_groups`, whatever it is called, or by its name.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from narrowgauge.errors import UsageError
from narrowgauge.observe.inspect.entry import Entry, names_an_optimizer, word
from narrowgauge.observe.inspect.numpy_scalars import STAND_INS

DEPTH = 64  # a file may refer to itself, and no checkpoint nests like this
VALUES = 2_000_000  # and a few containers that hold each other twice unfold into any number of them

# How torch words that a pickle asked for more than tensors: a name, or a step that its reader does not take.
_NAMED = re.compile(r"(?:unsupported GLOBAL|Unsupported global: GLOBAL|Unsupported class) ([^\s']+)")

# What it reads once these are imported: nested tensors of the layout `jagged`, and DTensors.
JAGGED, SPREAD = "torch._dynamo", "torch.distributed.tensor"

SAFE = ".safetensors"  # by which torch.load takes a path for such a file, whatever is in it

# What the format from before 2020 begins with: torch.serialization.MAGIC_NUMBER, pickled.
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class TorchFile:
    """One checkpoint, its pickle read and its tensors found.

    Raises UsageError if it is damaged, or wants code to be run.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        with path.open("rb") as file:
            mapped = file.read(2) == b"PK"  # a zip archive, of which bytes can be mapped
        whole = "" if mapped else "in torch's old format, which"
        if path.name.endswith(SAFE):
            whole, mapped = f"a torch checkpoint, whatever its name says. Under a name with {SAFE} it", False
        self.notes = (f"{path.name} is {whole} is read as a whole.",) if whole else ()
        self._tensors: dict[str, Tensor] = {}
        self.entries = tuple(self._entries(_load(path, mapped)))

    def read(self, name: str) -> Tensor:
        """One tensor, a view of the mapped file."""
        return self._tensors[name].detach()

    def _entries(self, content: Any) -> Iterator[Entry]:
        first: dict[tuple[Any, ...], str] = {}
        for count, (found, value, optimizer) in enumerate(_leaves(content, "", False, 0, self.path)):
            if count >= VALUES:
                raise UsageError(f"{self.path} holds more than {VALUES:,} values; expected a checkpoint's tensors.")
            if not isinstance(value, Tensor):
                continue
            name = _free(found or "tensor", self._tensors)
            self._tensors[name] = value
            why_not = _why_not(value)
            tied_to = "" if why_not else first.setdefault(_memory(value, name), name)
            yield Entry(
                name,
                (value.numel(),) if value.is_nested else tuple(value.shape),
                word(value.dtype),
                tied_to="" if tied_to == name else tied_to,
                optimizer=optimizer or names_an_optimizer(name),
                why_not=why_not,
            )


def _load(path: Path, mapped: bool) -> Any:
    try:
        try:
            return _read(path, mapped)
        except Exception as error:
            if JAGGED not in str(error):
                raise
            import_module(JAGGED)  # takes over a second, and no other file needs it
            return _read(path, mapped)
    except Exception as error:  # a damaged file fails in any way: IndexError, KeyError, OSError, RuntimeError, ...
        text = str(error)
        named = _NAMED.search(text)
        if SPREAD in text:
            raise UsageError(
                f"{path} holds DTensors, which are spread over processes: it has one process's part of them. Save "
                "whole tensors: each one's full_tensor(), or get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict."
            ) from error
        if named or "TorchScript" in text:
            wanted = f"it names `{named[1]}`" if named else "it is a TorchScript archive"
            plain = "tensors alone: torch.save(model.state_dict(), ...), or safetensors"
            if named and named[1].startswith("torchao."):  # a state dict already
                plain = "plain tensors: of each of torchao's what it stands for, its dequantize()"
            raise UsageError(
                f"{path} can only be read by running code that comes with it ({wanted}), and nothing of a file is run "
                f"here. Save {plain}."
            ) from error
        raise UsageError(
            f"{path} is no whole torch checkpoint: {_fault(path, error)}. If it was downloaded or copied, do that "
            "again; if another program wrote it, save its tensors with torch.save or as safetensors."
        ) from error


def _read(path: Path, mapped: bool) -> Any:
    with warnings.catch_warnings(), _stand_ins(), path.open("rb") as file:
        warnings.simplefilter("ignore")  # what is wrong is said once, by `_load`
        return torch.load(path if mapped else file, map_location="cpu", mmap=mapped, weights_only=True)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Meanwhile ours are safe, and none in the place of ours: packages allow numpy's own classes."""
    theirs = torch.serialization.get_safe_globals()
    ours = {_name(one) for one in STAND_INS}
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([*STAND_INS, *(one for one in theirs if _name(one) not in ours)])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(theirs)


def _name(safe: Any) -> str:
    """By which a file names it."""
    return safe[1] if isinstance(safe, tuple) else f"{safe.__module__}.{safe.__qualname__}"


def _fault(path: Path, error: Exception) -> str:
    """What is wrong with a file that could not be loaded: what its bytes say, else what torch says in words.

    Errors that are no words for a reader are those of the code that stumbled over the file: the key that it missed.
    """
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                whole = any(name.endswith("/data.pkl") for name in archive.namelist())
        except Exception:  # the list of what is in it comes last; damaged it, too, fails in any way
            return f"its end is missing or damaged, at {path.stat().st_size} bytes"
        if not whole:
            return "it is a zip archive without the data.pkl that torch.save writes"
    elif not MAGIC.startswith(start) and not start.startswith(MAGIC):
        return "it is a pickle that torch.save did not write"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if type(error) is RuntimeError:
        return str(error).partition("\n")[0].partition(" This is an internal")[0].rstrip(".")[:200]
    return "what it holds is damaged, or ends too early"


def _leaves(value: Any, name: str, optimizer: bool, depth: int, path: Path) -> Iterator[tuple[str, Any, bool]]:
    """(dotted name, value, whether an optimizer's) of all that is in nested containers."""
    if depth > DEPTH:
        raise UsageError(f"{path} nests more than {DEPTH} levels deep; expected dicts of tensors.")
    if isinstance(value, Mapping):
        items = list(value.items())
        optimizer = optimizer or {"state", "param_groups"} <= value.keys()
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        yield name, value, optimizer
        return
    for key, part in items:
        yield from _leaves(part, f"{name}.{key}" if name else str(key), optimizer, depth + 1, path)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """The name, or with a number behind it if two paths are written alike."""
    number, free = 2, name
    while free in taken:
        free, number = f"{name}#{number}", number + 1
    return free


def _memory(value: Tensor, name: str) -> tuple[Any, ...]:
    """What two tied tensors have in common; an empty tensor has nothing to share."""
    if not value.numel():
        return (name,)
    return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype


def _why_not(value: Tensor) -> str:
    if value.is_nested or value.layout != torch.strided:
        return f"it is {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')}"
    if type(value) not in (Tensor, Parameter):
        return f"its type is {type(value).__name__}"
    if value.is_quantized:
        return "it is one of torch's own quantized tensors"
    return "it was saved without its data (meta)" if value.device.type == "meta" else ""
