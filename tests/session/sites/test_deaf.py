"""A converted run of a program that compiles: functions that come and go would have its graphs made anew."""

import sys
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

from narrowgauge.observe.stats import Collector
from narrowgauge.session.plain_sites import PlainSites


def test_products_are_not_listened_to_and_that_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys.modules.get("torch._dynamo") or ModuleType("torch._dynamo"))
    sites = PlainSites("current", eager=False, training=lambda: True)
    sites.add(nn.Linear(8, 8), Collector(None, every=1))
    before = F.linear, torch.matmul
    sites.begin()
    assert (F.linear, torch.matmul) == before
    sites.end()
    assert sites.notes[0] == (
        "Products outside of known layers are not recorded: the program compiles, and converted layers are watched in "
        "its graphs."
    )
