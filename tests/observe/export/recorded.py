"""A run with all that an exporter meets: a NaN loss, a metric that not every site has, events, several segments."""

from __future__ import annotations

import duckdb
import numpy as np

from narrowgauge.observe.export.follower import Follower
from narrowgauge.observe.store import RunWriter

SITES = [f"layers.{number}.up:{role}" for number in range(5) for role in ("input", "weight")] + ["head:output"]
STEPS, EVERY = 40, 10


def write(writer: RunWriter, step: int) -> None:
    """One step's rows, from a formula."""
    random = np.random.default_rng(step)
    loss = float("nan") if step == 7 else 1 / step
    writer.add_scalars(step, loss=loss, lr=1e-3, tokens=48.0, nonfinite=float(step == 7), data_digest=1e300)
    if step % EVERY == 0:
        sqnr = random.random(len(SITES)).astype(np.float32)
        sqnr[-1] = np.nan  # a result has none
        writer.add_tensors(step, SITES, {"amax": random.random(len(SITES)), "sqnr_db": sqnr, "mse": sqnr})
    if step == 7:
        writer.add_event(7, "nan", "the loss is not finite")
        writer.add_event(7, "watch_failed", "no room", site=SITES[0])


def rows(folder, kind, columns):
    """What the run's own files say, asked without narrowgauge."""
    with duckdb.connect() as db:
        return db.execute(f"SELECT {columns} FROM '{folder}/{kind}/*.parquet' ORDER BY ALL").fetchall()


def scalars(folder):
    """{name: {step: value}}, NaN for what was stored as null."""
    found = {}
    for name, step, value in rows(folder, "scalars", "name, step, value"):
        found.setdefault(name, {})[step] = float("nan") if value is None else value
    return found


def column(folder, metric, role, step):
    """{site: value} of one metric in one step."""
    found = rows(folder, "tensors", f"site, step, {metric}")
    return {site: value for site, at, value in found if at == step and site.endswith(":" + role) and value is not None}


def summary(folder, metric, role, step):
    """Least, median and greatest over the sites of a role, by numpy."""
    values = np.array(list(column(folder, metric, role, step).values()), np.float64)
    return {"min": values.min(), "median": np.median(values), "max": values.max()}


def export(exporter, folder, sites=()):
    """Feed a run that has ended to an exporter, in this thread; its follower."""
    follower = Follower("test", lambda: exporter, folder, list(sites))
    follower.end()
    follower.run()
    return follower
