"""Where benchmarks leave their figures: one JSON file each, with the machine, the versions and the date."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from narrowgauge.session.machine import hardware, versions

RESULTS = Path(__file__).parent / "results"


def record(name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write `results/NAME_HARDWARE.json` and print the rows as a table."""
    device = hardware()
    slug = "h200" if "H200" in device else "cpu"
    facts = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": device,
        "versions": versions(),
        "settings": settings,
        "rows": rows,
    }
    path = RESULTS / f"{name}_{slug}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{name} on {device}")
    widths = {key: max(len(key), *(len(str(row.get(key, ""))) for row in rows)) for key in rows[0]}
    print("  ".join(key.rjust(width) for key, width in widths.items()))
    for row in rows:
        print("  ".join(str(row.get(key, "")).rjust(width) for key, width in widths.items()))
    return path
