"""Settings that are too many for flags: `--config narrowgauge.toml`.

seed = 1234
[watch]
every = 10                 # record tensors every so many steps
[convert]
skip = ["lm_head"]         # globs on module names
first = 0                  # blocks kept high at the input end
last = 2                   # ... and at the output end
skip_slow = true           # layers that FP8 slows down on this GPU stay high
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.errors import UsageError, nearest

CONVERT_KEYS: dict[str, type | tuple[type, ...]] = {
    "skip": list,
    "only": list,
    "first": int,
    "last": int,
    "backend": str,
    "skip_slow": bool,
    "tokens": int,
}


@dataclass(frozen=True)
class Config:
    """The settings of one comparison or run."""

    seed: int = 1234
    every: int = 10
    convert: dict[str, Any] = field(default_factory=dict)


def load(path: Path | None) -> Config:
    """Read a configuration file; the defaults if `path` is None.

    Raises UsageError for a missing file, broken TOML, an unknown key (with the nearest one) or a value of the wrong
    type.
    """
    if path is None:
        return Config()
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error
    _check(path, "", data, {"seed": int, "watch": dict, "convert": dict})
    watch, convert = data.get("watch", {}), data.get("convert", {})
    _check(path, "watch.", watch, {"every": int})
    _check(path, "convert.", convert, CONVERT_KEYS)
    every = watch.get("every", Config.every)
    if every < 1:
        raise UsageError(f"{path}: watch.every is {every}; expected 1 (every step) or more.")
    return Config(data.get("seed", Config.seed), every, dict(convert))


def _check(path: Path, prefix: str, data: dict[str, Any], known: dict[str, type | tuple[type, ...]]) -> None:
    for key, value in data.items():
        if key not in known:
            raise UsageError(f"{path}: unknown key {prefix}{key!r}: {nearest(key, known)}")
        kind = known[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
            raise UsageError(f"{path}: {prefix}{key} is {value!r}; expected a value of type {wanted}.")
