"""An inspection as JSON: everything that was measured, for machines.

0/0 is null; what is infinite, as the SQNR of a perfect copy, is "Infinity" or "-Infinity": JSON has no word for it,
and Python's float() and JavaScript's Number() both read these.
"""

from __future__ import annotations

import json
import math
from typing import Any

from narrowgauge.observe.inspect.inspection import Inspection, Looked
from narrowgauge.observe.inspect.scales import one_per

SCHEMA = 2


def as_json(seen: Inspection) -> str:
    """The whole of it, one tensor per line."""
    head = {
        "schema": SCHEMA,
        "file": seen.checkpoint.path.name,
        "bytes": seen.checkpoint.size,
        "tensors": len(seen.checkpoint.entries),
        "looked_at": len(seen.rows),
        "parameters": seen.parameters,
        "dtypes": seen.dtypes,
        "roles": list(seen.roles),
        "recipes": {
            rule.name: {
                "same": list(rule.same),
                "operands": {
                    role: {
                        "format": operand.fmt.name,
                        "one_per": one_per(operand.granularity),
                        "scaling": operand.scaling.name,
                    }
                    for role, operand in rule.operands.items()
                },
            }
            for rule in seen.rules
        },
        "notes": list(seen.checkpoint.notes),
        "not_finite": [row.entry.name for row in seen.not_finite()],
        "worst": {rule.name: [row.entry.name for row in seen.worst(rule.name)] for rule in seen.rules},
    }
    rows = ",\n  ".join(json.dumps(_plain(_row(row)), allow_nan=False) for row in seen.rows)
    start = json.dumps(_plain(head), indent=1, allow_nan=False)[:-2]
    return start + ',\n "rows": [' + (f"\n  {rows}\n ]" if rows else "]") + "\n}\n"


def _row(row: Looked) -> dict[str, Any]:
    entry = row.entry
    about = {"name": entry.name, "kind": row.kind, "shape": list(entry.shape), "dtype": entry.dtype}
    optional = {
        "role": row.role,
        "optimizer": entry.optimizer,
        "note": row.note,
        "metrics": row.own,
        "codes": row.codes,
        "best": row.best,
    }
    became = {
        name: {
            **numbers,
            "badness": row.judged[name].badness,
            "sign": row.judged[name].sign,
            "why": row.judged[name].why,
        }
        for name, numbers in row.became.items()
    }
    return about | {key: value for key, value in (*optional.items(), ("recipes", became)) if value}


def _plain(value: Any) -> Any:
    """The same with a word for what is no JSON number."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
