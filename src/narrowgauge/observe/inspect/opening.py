"""From a path to a checkpoint: the first bytes say what a file is, whatever it is called.

"PK"                      a torch checkpoint (a zip archive)
0x80                      a torch checkpoint in the old format (a bare pickle)
"{" and a .json name      an index: `weight_map` says which file beside it holds each tensor
length, then "{"          safetensors
"""

from __future__ import annotations

import json
import shlex
from difflib import get_close_matches
from pathlib import Path

from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.observe.inspect.entry import Checkpoint, Entry
from narrowgauge.observe.inspect.safetensors_file import SafetensorsFile
from narrowgauge.observe.inspect.torch_file import TorchFile

TORCH_NAMES = (".pt", ".pth", ".bin", ".ckpt")
KNOWN = (*TORCH_NAMES, ".safetensors", ".index.json")
PARTS = ".distcp"
EXPECTED = "expected safetensors, a torch checkpoint (.pt, .pth, .bin, .ckpt) or an index of shards (.index.json)"


def open_checkpoint(path: Path) -> Checkpoint:
    """Open any file of tensors; UsageError says why if it cannot be read."""
    start = _start(path)
    if path.suffix == ".json":
        return Shards(path)
    if start[8:9] == b"{" or (path.suffix == ".safetensors" and len(start) <= 8):  # cut off before it says what it is
        return SafetensorsFile(path)
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return TorchFile(path)
    raise UsageError(f"{path} begins with {start[:8]!r}, which nothing known here does; {EXPECTED}.")


def _start(path: Path) -> bytes:
    """The first bytes of a file that is there and is one."""
    of = path if path.is_dir() else path.parent
    if (path.suffix == PARTS or path.is_dir()) and any(of.glob(f"*{PARTS}")):
        raise UsageError(
            f"{path} is of a checkpoint in parts (torch.distributed.checkpoint); make one file of it and inspect that: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {of} model.pt"
        )
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.name.endswith(KNOWN))
        # Of a model in several files the index names all of them.
        inside.sort(key=lambda name: not name.endswith(".json"))
        hint = f"name a file in it: {', '.join(inside[:5])}" if inside else f"nothing in it is known here; {EXPECTED}"
        if not inside and (path / "run.json").is_file():
            hint = f"it holds a run, of which `narrowgauge report {shlex.quote(str(path))}` makes a page"
        raise UsageError(f"{path} is a folder; {hint}.")
    try:
        if not path.exists():
            beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            near = get_close_matches(path.name, beside, n=1)
            raise UsageError(f"there is no file {path}" + (f"; did you mean {near[0]!r}?" if near else "."))
        if not path.is_file():
            raise UsageError(f"{path} is no regular file; {EXPECTED}.")
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    if not start:
        raise UsageError(f"{path} is empty; {EXPECTED}.")
    if start.startswith(b"version https://git-lfs"):
        raise UsageError(f"{path} is Git LFS's placeholder for the file, not the file; get it with `git lfs pull`.")
    return start


class Shards:
    """Several files behind one index, one of them open at a time.

    Raises UsageError if the index is none, a shard is missing or does not hold what the index says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._where = _weight_map(path)
        entries: list[Entry] = []
        notes: list[str] = []
        self.size = path.stat().st_size
        for shard in dict.fromkeys(self._where.values()):
            self._open(shard)
            self.size += self._current.size
            notes += self._current.notes
            wanted = {name for name, where in self._where.items() if where == shard}
            found = [entry for entry in self._current.entries if entry.name in wanted]
            if missing := sorted(wanted - {entry.name for entry in found}):
                raise UsageError(
                    f"{path} says that {shard} holds {missing[0]!r}, which it does not "
                    f"({len(missing)} of {len(wanted)} are missing); index and shards are of different models."
                )
            if left := len(self._current.entries) - len(found):
                notes.append(f"{shard} holds {left} tensors that the index does not name; they are left out.")
            entries += found
        self.entries, self.notes = tuple(entries), tuple(notes)

    def read(self, name: str) -> Tensor:
        """One tensor, from the shard that holds it."""
        if self._where[name] != self._name:
            self._open(self._where[name])
        return self._current.read(name)

    def _open(self, shard: str) -> None:
        place = self.path.parent / shard
        if not place.is_file():
            raise UsageError(f"{self.path} names the shard {shard}, which is not beside it; get the missing file.")
        self._name, self._current = shard, open_checkpoint(place)


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file; files are names beside the index and nothing else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise _no_index(path, f"line {error.lineno} is no JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise _no_index(path, "it is not UTF-8" if isinstance(error, ValueError) else "it nests too deep") from error
    if not isinstance(content, dict) or "weight_map" not in content:
        raise _no_index(path, "it has no weight_map")
    where = content["weight_map"]
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise UsageError(f"{path} has no usable weight_map; expected tensor names, each with the name of its file.")
    for shard in set(where.values()):
        if not shard or Path(shard).name != shard or shard.endswith(".json"):
            raise UsageError(f"{path} names the shard {shard!r}; expected the name of a file of tensors beside it.")
    return where


def _no_index(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no index ({why}); expected JSON with a weight_map.")
