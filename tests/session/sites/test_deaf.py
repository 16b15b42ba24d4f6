"""A converted run of a program that compiles: functions that come and go would have its graphs made anew."""

from collections import Counter, defaultdict

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn import functional as F

from narrowgauge.observe.stats import Collector
from narrowgauge.session.sites.plain_sites import PlainSites


def test_products_are_not_listened_to_and_that_is_told():
    sites = PlainSites("current", eager=False, training=lambda: True, compiles=lambda: True)
    sites.add(nn.Linear(8, 8), Collector(None, every=1))
    before = F.linear, torch.matmul
    sites.begin()
    assert (F.linear, torch.matmul) == before
    sites.end()
    assert sites.notes[0] == (
        "Products outside of known layers are not recorded: the program compiles, and converted layers are watched in "
        "its graphs."
    )


class Two(nn.Module):
    """A layer that is converted, and a product that is nobody's layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(32, 32), nn.Parameter(torch.ones(32, 32))

    def forward(self, x):
        return F.linear(self.layer(x), self.head)


@pytest.mark.parametrize("how", ["not", "in place", "a function", "before"])
def test_only_a_program_that_compiles_is_not_listened_to(tmp_path, monkeypatch, how):
    counters = defaultdict(Counter)  # of this program alone: other tests have compiled in this process
    monkeypatch.setattr("torch._dynamo.utils.counters", counters)
    if how == "before":
        counters["stats"]["unique_graphs"] += 1
    with followed(tmp_path, recipe="current", judge="current", every=1, compiling=True) as (session, writer):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "in place":
            model.compile(backend="eager")
        if how == "a function":
            torch.compile(lambda x: x, backend="eager")
        for _ in range(2):
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
    seen = {site for _, sites, _ in writer.tensors for site in sites}
    heard = {"head:input", "head:weight", "head:grad_output"} & seen
    told = [note for note in session.facts()["notes"] if note.startswith("Products outside of known layers")]
    assert (len(heard), len(told)) == ((3, 0) if how == "not" else (0, 1))
    assert {"layer:input", "layer:weight", "layer:grad_output"} <= seen
