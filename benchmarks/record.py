"""Where benchmarks leave their figures: one JSON file each, with the machine, the versions and the date."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import torch

from narrowgauge.session.machine import hardware, versions

SHOWN = ("python", "torch", "triton", "cuda")  # of a transcript's versions
RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """As file names have it: "cpu", or the GPU's name without its maker, such as "h200"."""
    return "-".join(hardware().lower().split()[1:]) if torch.cuda.is_available() else "cpu"


def record(name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write `results/NAME_HARDWARE.json` and print the rows as a table."""
    device = hardware()
    facts = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": device,
        "versions": versions(),
        "settings": settings,
        "rows": rows,
    }
    path = RESULTS / f"{name}_{machine()}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{name} on {device}")
    widths = {key: max(len(key), *(len(str(row.get(key, ""))) for row in rows)) for key in rows[0]}
    print("  ".join(key.rjust(width) for key, width in widths.items()))
    for row in rows:
        print("  ".join(str(row.get(key, "")).rjust(width) for key, width in widths.items()))
    return path


def transcript(name: str, command: str, lines: list[str], *, further: dict[str, str] | None = None) -> Path:
    """Write `results/NAME_HARDWARE.txt`: machine, versions (and `further` ones) and date, then the lines."""
    device, count = hardware(), torch.cuda.device_count()
    known = {name: version for name, version in versions().items() if name in SHOWN} | (further or {})
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = [f"{count} x {device}" if count > 1 else device, *(" ".join(pair) for pair in known.items()), date]
    path = RESULTS / f"{name}_{machine()}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([f"# {', '.join(head)}", f"# {command}", *lines]) + "\n")
    return path
