"""One recorded step of a model, and the same tensors counted by hand."""

import numpy as np
import torch

import narrowgauge as ng
from narrowgauge.compute.recipes import by_name
from narrowgauge.observe.stats import Collector
from narrowgauge.session.sites.plain_sites import PlainSites

COLUMNS = ("numel", "amax", "mean", "std", "sqnr_db", "gain")


class Rows:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.rows, self.events = {}, []

    def add_tensors(self, step, sites, columns):
        for i, site in enumerate(sites):
            self.rows[site] = {name: np.asarray(values)[i] for name, values in columns.items()}

    def add_event(self, *args, **kwargs):
        self.events.append(args)


def recorded(model, step, recipe="current", *, training=True):
    """Run `step()` as one recorded step: its rows by site, and the notes. `training`: inside a call of the model."""
    writer = Rows()
    collector = Collector(writer, every=1)
    sites = PlainSites(recipe, eager=True, training=lambda: training)
    sites.add(model, collector)
    collector.begin_step(1)
    sites.begin()
    try:
        step()
    finally:
        sites.end()
    collector.flush()
    assert not writer.events
    return writer.rows, " ".join(sites.notes)


def counted(x_MK, role, recipe="current", granularity=None):
    """The same columns of a matrix, quantized by hand."""
    rule = by_name(recipe).uses(role)[0]
    x_MK = x_MK.detach()
    q = ng.quantize(x_MK, rule.fmt, granularity=granularity or rule.granularity, scaling=rule.scaling)
    return ng.measure(x_MK, q)


def check(row, want):
    """Compare two rows, number by number."""
    for name in COLUMNS:
        np.testing.assert_allclose(row[name], want[name], rtol=2e-5, atol=1e-9, err_msg=name)


def same(rows, site, parts, role, recipe="current"):
    """Check a site against its tensors, one for each time that it was seen: sums add up, amaxes are the largest."""
    row = rows[f"{site}:{role}"]
    if isinstance(parts, torch.Tensor):
        check(row, counted(parts, role, recipe))
        return
    together = torch.cat([p.detach().reshape(-1).double() for p in parts])
    assert row["numel"] == together.numel()
    np.testing.assert_allclose(row["amax"], together.abs().max().item(), rtol=1e-6)
    np.testing.assert_allclose(row["mean"], together.mean().item(), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(row["std"], together.std(correction=0).item(), rtol=1e-5)
