"""On a GPU: the compiled layer's numbers, no host waiting inside a step, and CUDA graphs with the right scales."""

import pytest
import torch
from tests.waiting import no_waiting
from torch import nn
from torch._dynamo.utils import counters

import narrowgauge as ng
from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.observe.stats import Collector

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytestmark = [pytest.mark.gpu, cuda, pytest.mark.filterwarnings("ignore")]
RECIPES = ["current", "delayed", "rowwise", "blockwise"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(256), nn.Linear(256, 512), nn.Linear(512, 256, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def model_of(recipe, blocks=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).cuda().bfloat16()
    return ng.convert(model, recipe=recipe)[0]


def train(model, call, steps=5, microbatches=1, waits=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for step in range(steps):
        with no_waiting(not waits and step >= 3):  # compiled, captured, every scale known
            for _ in range(microbatches):
                torch.compiler.cudagraph_mark_step_begin()
                x = torch.randn(4, 128, 256, generator=generator, device="cuda", dtype=torch.bfloat16)
                loss = (call(x) - x.roll(1, 0)).square().mean()
                loss.backward()
                losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), ng.scaling_state(model)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_layer_compiled_gives_the_eager_bits(recipe):
    torch.manual_seed(0)
    layers = [ng.convert(nn.Sequential(nn.Linear(256, 512)).cuda().bfloat16(), recipe=recipe)[0] for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    found = []
    for layer, call in ((layers[0], layers[0]), (layers[1], torch.compile(layers[1], fullgraph=True))):
        generator = torch.Generator("cuda").manual_seed(1)
        x = torch.randn(256, 256, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = call(x)
        y.backward(torch.randn(y.shape, generator=generator, device="cuda", dtype=torch.bfloat16))
        found.append((y, x.grad, layer[0].weight.grad, layer[0].bias.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["default", "CUDA graphs"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_training_is_eager_training(recipe, mode):
    eager, model = model_of(recipe), model_of(recipe)
    want, state = train(eager, eager, steps=8)
    found, other = train(model, torch.compile(model, fullgraph=True, mode=mode), steps=8, waits=False)
    assert torch.allclose(found, want, rtol=2e-2)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for key, value in state.items():  # the histories hold one amax per step, of nearly the same numbers
        if key.endswith("history"):
            assert (other[key] > 0).sum() == (value > 0).sum() == 8 * 3
            torch.testing.assert_close(other[key], value, rtol=0.3, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_replays_what_a_plain_run_computes(recipe):
    runs = []
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        model = model_of(recipe)
        runs.append(train(model, torch.compile(model, mode=mode), steps=8))
    (losses, state), (replayed, other) = runs
    torch.testing.assert_close(replayed, losses, rtol=1e-3, atol=0)
    for key in state:
        torch.testing.assert_close(other[key], state[key], rtol=1e-2, atol=0)


class Book(dict):
    def add_tensors(self, step, sites, columns):
        self.update({(step, site): columns["amax"][at] for at, site in enumerate(sites)})

    def add_event(self, step, kind, message, site=None, **data):
        raise AssertionError(message)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_on_another_gpu_than_the_current_one(recipe, watched):
    found = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).bfloat16().to(device)
        model = ng.convert(plain, recipe=recipe)[0]
        book = Book()
        collector = Collector(book)
        set_observer(model, collector if watched else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            collector.begin_step(step)
            x = torch.randn(256, 256, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        collector.flush()
        assert torch.cuda.current_device() == 0
        assert collector.failures == 0
        found.append(([loss.cpu(), *(p.detach().cpu() for p in model.parameters())], book))
    (here, rows), (there, others) = found
    assert rows == others
    assert bool(rows) == watched
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_watching_waits_for_nothing_either(recipe):
    class Writer:
        rows = 0

        def add_tensors(self, step, sites, columns):
            self.rows += len(sites)

        def add_event(self, step, kind, message, site=None, **data):
            raise AssertionError(message)

    model, writer = model_of(recipe), Writer()
    collector = Collector(writer)
    set_observer(model, collector)
    call = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(8):
        with no_waiting(step >= 3):
            collector.begin_step(step)
            for _ in range(2):
                x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
                call(x).square().mean().backward()
            collector.end_step()
            optimizer.step()
            optimizer.zero_grad()
    collector.flush()
    assert writer.rows >= 8 * 4 * 3
    assert collector.failures == 0
