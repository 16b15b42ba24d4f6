"""What one run of a training program should do, as frozen data that travels to its process as JSON.

The parent writes `plan.json` into the run's folder; the child reads it and follows it. Nothing else passes between them
but files: `status.json` (for the progress display), the run itself, and the program's own output.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Baseline = Literal["asis", "bf16", "fp16", "fp32"]
PLAN_FILE = "plan.json"
STATUS_FILE = "status.json"


@dataclass(frozen=True)
class Plan:
    """One run: who it is, what is converted, what is measured.

    `steps` counts optimizer steps (None: as many as the program makes); `every` is the cadence, in steps, at which
    tensors are recorded; `probe` names the recipes measured at the same weights, `probe_steps` when; of `rehearse` at
    least one must be able to convert a model, or the run ends before its first step.
    """

    variant: str
    out: str
    command: tuple[str, ...]
    recipe: str | None = None
    seed: int = 1234
    steps: int | None = None
    every: int = 10
    noise: float = 0.0  # relative perturbation of the initial weights
    baseline: Baseline = "asis"
    probe: tuple[str, ...] = ()
    probe_steps: tuple[int, ...] = ()
    rehearse: tuple[str, ...] = ()
    convert: dict[str, Any] = field(default_factory=dict)
    # What a settings file says besides, as plain data: see `session.config.tables` for the keys.
    watch: dict[str, Any] = field(default_factory=dict)
    dump: tuple[dict[str, Any], ...] = ()
    what_if: tuple[str, ...] = ()  # recipes that every recorded operand is judged by as well
    seldom: bool = False  # ... or, in few of the recorded steps, those of products that nobody converted
    export: dict[str, Any] = field(default_factory=dict)  # only what is switched on; empty if nothing is
    judge: str = ""  # the recipe that linear layers which stay plain are judged by; none if empty
    compiling: bool = False  # may the program compile its model? the probe at the same weights needs it eager

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", os.path.abspath(self.out))  # a program may change where it works

    @property
    def folder(self) -> Path:
        """The run's folder, absolute."""
        return Path(self.out)

    @property
    def path(self) -> Path:
        """Its file in the run's folder."""
        return self.folder / PLAN_FILE

    def write(self, *, new: bool = False) -> Path:
        """Write `plan.json` into the run's folder and return its path; FileExistsError if it is to be `new` and not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("x" if new else "w") as file:
            file.write(json.dumps(asdict(self), indent=1))
        return self.path

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The inverse of `write`."""
        data = json.loads(path.read_text())
        for name in ("command", "probe", "probe_steps", "rehearse", "dump", "what_if"):
            data[name] = tuple(data[name])
        return cls(**data)
