"""A converted run of a program that compiles: products outside of its graphs are heard, those inside are not."""

import threading
from collections import Counter, defaultdict

import pytest
import torch
from tests.session.inline import followed
from tests.session.sites.compiled_programs import Compiles
from torch import nn
from torch.nn import functional as F

from narrowgauge.observe.stats import Collector
from narrowgauge.session.sites.plain_sites import PlainSites

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's, of an input
TOLD = Compiles(some=False, told=True)


def test_where_torch_does_not_tell_of_graphs_products_are_not_listened_to_and_that_is_told():
    sites = PlainSites("current", eager=False, training=lambda: True, compilations=Compiles())
    sites.add(nn.Linear(8, 8), Collector(None, every=1))
    before = F.linear, torch.matmul
    sites.begin()
    assert (F.linear, torch.matmul) == before
    sites.end()
    assert sites.notes[0] == (
        "Products outside of known layers are not recorded: the program compiles, and this torch does not tell when "
        "what it compiled is called."
    )


def test_while_something_compiled_runs_torch_is_as_it_was_found():
    sites = PlainSites("current", eager=False, training=lambda: True, compilations=Compiles(told=True))
    before, during = F.linear, []
    sites.begin()
    during.append(F.linear)
    outer, inner = sites.compiled.compiled_runs("followed"), sites.compiled.compiled_runs("bare")
    inner()
    during.append(F.linear)
    outer()
    during.append(F.linear)
    spanning = sites.compiled.compiled_runs("followed")
    sites.end()
    sites.begin()  # in it: the next recorded step
    during.append(F.linear)
    spanning()
    during.append(F.linear)
    sites.end()
    assert [function is before for function in during] == [False, True, False, True, False]
    assert F.linear is before


def test_another_thread_that_runs_something_compiled_meanwhile_is_told():
    sites, notes = PlainSites("current", eager=False, training=lambda: True, compilations=TOLD), []
    sites.begin()
    sites.compiled.compiled_runs("bare")()
    notes.append(" ".join(sites.notes))
    thread = threading.Thread(target=lambda: sites.compiled.compiled_runs("bare")())
    thread.start()
    thread.join()
    notes.append(" ".join(sites.notes))
    sites.end()
    assert notes[0] == ""
    assert notes[1].startswith("What is compiled ran in one thread while another was recorded")


@pytest.mark.parametrize("before", [False, True])
def test_one_that_still_runs_when_the_step_begins_is_told_if_it_is_another_threads(before):
    sites, over = PlainSites("current", eager=False, training=lambda: True, compilations=TOLD), []
    if before:
        thread = threading.Thread(target=lambda: over.append(sites.compiled.compiled_runs("unheard")))
        thread.start()
        thread.join()
    else:
        over.append(sites.compiled.compiled_runs("unheard"))
    sites.begin()
    told = " ".join(sites.notes)
    sites.end()
    over[0]()
    assert told.startswith("What is compiled ran in one thread while another was recorded") == before


class Two(nn.Module):
    """A layer that is converted, and a product that is nobody's layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(32, 32), nn.Parameter(torch.ones(32, 32))

    def forward(self, x):
        return F.linear(self.layer(x), self.head)


@pytest.mark.parametrize("how", ["not", "in place", "another function", "before"])
def test_only_what_is_compiled_is_not_listened_to(tmp_path, monkeypatch, how):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    counters = defaultdict(Counter)  # of this program alone: other tests have compiled in this process
    monkeypatch.setattr("torch._dynamo.utils.counters", counters)
    if how == "before":
        counters["stats"]["unique_graphs"] += 1
    with followed(tmp_path, recipe="current", judge="current", every=1, compiling=True) as (session, writer):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "in place":
            model.compile(backend=backend)
        act = torch.compile(torch.tanh, backend=backend) if how == "another function" else torch.tanh
        for _ in range(2):
            act(model(torch.ones(4, 32))).sum().backward()
            optimizer.step()
    seen = {site for _, sites, _ in writer.tensors for site in sites}
    heard = {"head:input", "head:weight", "head:grad_output"} & seen
    told = [note for note in session.facts()["notes"] if note.startswith("Products outside of known layers")]
    assert (len(heard), len(told)) == ((0, 1) if how == "in place" else (3, 0))
    assert {"layer:input", "layer:weight", "layer:grad_output"} <= seen
    assert len(graphs) == (how in ("in place", "another function"))


class Head(nn.Module):
    """A layer that cannot be converted."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 3)

    def forward(self, x):
        return self.layer(x)


def test_a_plain_model_that_is_first_called_in_a_recorded_step_is_compiled_once(tmp_path):
    """Its layers have hooks then, and none afterwards."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with followed(tmp_path, recipe="current", judge="current", every=1, compiling=True):
        torch.manual_seed(0)
        body, head = nn.Linear(32, 32), Head()
        head.compile(backend=backend, fullgraph=True)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (body, head)]
        for _ in range(3):
            head(body(torch.ones(16, 32))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(graphs) == 1
