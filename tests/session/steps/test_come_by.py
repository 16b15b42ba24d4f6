"""Where ranks come by for each other: once between steps, as an optimizer has stepped, and in no compiled function."""

import pytest
import torch
from tests.compute.nn.compiled_steps import Counted, build

import narrowgauge as ng
from narrowgauge.session.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's, of an input
STEPS = 3


@pytest.fixture
def places(monkeypatch):
    """Where the program is, and in which step ranks came by, where."""
    came, here = [], ["before"]
    monkeypatch.setattr(Ranks, "tick", lambda ranks, step: came.append((step, here[0])))
    return here, came


def train(folder, model, update, here):
    with ng.watch(model, out=folder, every=2):
        for _ in range(STEPS):
            here[0] = "forward"
            model(torch.ones(2, 16)).square().mean().backward()
            here[0] = "update"
            update()
            here[0] = "behind"


@pytest.mark.parametrize("several", [False, True])
def test_as_the_first_optimizer_has_stepped(places, tmp_path, several):
    here, came = places
    model, _ = build("sgd")
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(held, lr=0.1) for held in ([[p] for p in parameters] if several else [parameters])]

    def update():
        for optimizer in optimizers:
            optimizer.step()
            here[0] = "another update"

    train(tmp_path / "run", model, update, here)
    assert came == [(step, "update") for step in range(2, STEPS + 2)]


def test_behind_a_compiled_function_that_steps_in_its_graph(places, tmp_path):
    here, came = places
    model, optimizer = build("plain")
    counted = Counted()
    train(tmp_path / "run", model, torch.compile(optimizer.step, backend=counted.backend, fullgraph=True), here)
    assert counted.graphs == 1
    assert came == [(step, "forward") for step in range(2, STEPS + 1)]
