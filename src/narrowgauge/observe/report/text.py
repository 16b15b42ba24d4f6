"""A run as text, step by step, at full precision: for grep, diff and the eyes of the careful.

    step 10
      loss 2.718281828459045
      tensors
        layers.0.mlp.up:input  numel 524288  amax 3.4375  ...
      nan at layers.0.mlp.up:input: 12 elements are NaN

Every number is printed so that reading it back gives the same float64 (1e-07 never reads 0.0000). Histograms are lists
of counts from their first to their last bin that holds anything, behind the number of that first bin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from narrowgauge.metrics import CATALOG
from narrowgauge.observe.report import words
from narrowgauge.observe.report.steps import made
from narrowgauge.observe.store import Run
from narrowgauge.observe.verdict.began import began

# Read in pieces, so that a long run's text can be streamed without holding its tensors in memory.
STEPS_AT_ONCE = 256
HEAD = ("command", "variant", "recipe", "baseline_dtype", "hardware", "device", "git_revision", "seeds", "weights_hash")


def text(run: Run) -> str:
    """All that was recorded, as one text; `lines` gives the same line by line."""
    return "\n".join(lines(run))


def lines(run: Run) -> Iterator[str]:
    """All that was recorded, line by line. Missing values are left out, values that are not finite are not."""
    why = run.ends.words.removeprefix("stopped: ")  # as the status says already
    yield f"status {run.status}" + (f": {words.scrub(why)}" if why else "")
    meta = run.meta
    for key in HEAD:
        if meta.get(key) not in (None, "", [], {}):
            value = words.command_line(meta[key]) if key == "command" else meta[key]
            yield f"{key} {value}"
    versions = meta.get("versions")
    if isinstance(versions, Mapping):
        yield "versions " + ", ".join(f"{name} {version}" for name, version in versions.items())
    if broke := began(run):
        yield f"not finite: {broke}"
    scalars = run.scalars()
    scalar_rows = {int(step): index for index, step in enumerate(scalars["step"])}
    trained = made(scalars)
    events: dict[int, list[dict[str, Any]]] = {}
    table = run.events()
    for index in range(table.rows):
        row = table.row(index)
        events.setdefault(int(row["step"]), []).append(row)
    steps = sorted({*map(int, run.steps), *events})
    if not steps:
        yield "nothing was recorded"
    names = [name for name in scalars.columns if name != "step"]
    for start in range(0, len(steps), STEPS_AT_ONCE):
        piece = steps[start : start + STEPS_AT_ONCE]
        tensors = _tensor_lines(run, piece)
        for step in piece:
            yield ""
            yield f"step {step}"
            if step in scalar_rows:
                for name in names:
                    value = scalars[name][scalar_rows[step]]
                    if shown := number(value):
                        yield f"  {name} {shown}"
                    elif name == "loss" and trained[scalar_rows[step]]:
                        # the store keeps a NaN as null: a step without a loss must be seen
                        yield "  loss nan"
            if step in tensors:
                yield "  tensors"
                yield from tensors[step]
            for event in events.get(step, ()):
                where = f" at {event['site']}" if event["site"] else ""
                yield f"  {event['kind']}{where}: {words.scrub(str(event['message'] or ''))}"


def _tensor_lines(run: Run, steps: list[int]) -> dict[int, list[str]]:
    table = run.tensors(steps=steps)
    result: dict[int, list[str]] = {}
    metrics = [name for name in table.columns if name not in ("step", "rank", "site")]
    counts = {name for name in metrics if name in CATALOG and CATALOG[name].kind == "count"}
    ranks = len(np.unique(table["rank"])) > 1 if table.rows else False
    for index in range(table.rows):
        site = str(table["site"][index]) + (f" rank {table['rank'][index]}" if ranks else "")
        parts = [f"{name} {shown}" for name in metrics if (shown := number(table[name][index], name in counts))]
        result.setdefault(int(table["step"][index]), []).append("    " + "  ".join([site, *parts]))
    return result


def number(value: Any, whole: bool = False) -> str:
    """A value so that reading it back gives the same; "" for one that is missing; `whole` numbers without ".0".

    >>> number(0.1), number(np.float64(1e-7)), number(np.int64(12)), number(np.float64(3.0))
    ('0.1', '1e-07', '12', '3.0')
    """
    if value is None:
        return ""
    if isinstance(value, np.ndarray | list | tuple):
        counts = np.asarray(value)
        held = np.flatnonzero(counts)
        if not len(held):
            return "[]"
        inside = counts[held[0] : held[-1] + 1]
        return f"{held[0]}:[{' '.join(str(int(c)) for c in inside)}]"
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and plain != plain:
        return ""
    return repr(int(plain) if whole else plain)
