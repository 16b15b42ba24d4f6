"""Programs that capture CUDA graphs: nothing of ours gets into a capture, and replays are the steps that they are."""

import functools

import pytest
import torch
from tests.session.inline import followed, through_a_backward_thread
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Launched(TorchDispatchMode):
    """What is launched, in order; `detach` launches nothing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.detach.default:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class FakeGraph:
    """A graph as a CPU can have one: what it captured is a function, which a replay calls."""

    capturing = False
    work = None

    def capture_begin(self, *args, **kwargs):
        type(self).capturing = True

    def capture_end(self):
        type(self).capturing = False

    def replay(self):
        if self.work is not None:
            self.work()


@pytest.fixture
def graph(monkeypatch):
    """A class of graphs in the place of torch's; a GPU is awake as long as one captures."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: FakeGraph.capturing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: FakeGraph.capturing)

    def touched(*args, **kwargs):
        raise AssertionError("nothing may be asked of a GPU while it captures")

    for name in ("Event", "synchronize", "memory_stats_as_nested_dict"):
        monkeypatch.setattr(torch.cuda, name, touched)
    return FakeGraph


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.25), torch.zeros(8, 16), {}


def step(model, optimizer, x, kept, clip=True):
    optimizer.zero_grad(set_to_none=False)
    loss = (model(x) - 1).square().mean()
    loss.backward()
    if clip:
        kept["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    kept["loss"] = loss


def capture(graph, program):
    """As `with torch.cuda.graph(g)` does it; returns the graph and what was launched."""
    g, launched = graph(), Launched()
    g.capture_begin()
    with launched:
        program()
    g.capture_end()
    return g, launched.names


def test_nothing_of_ours_is_launched_or_asked_in_a_capture(graph, tmp_path):
    alone = parts()
    step(*alone)
    _, wanted = capture(graph, lambda: step(*alone))
    watched = parts()
    with followed(tmp_path, every=1, judge="current", compiling=True) as (session, _):
        optimizer = torch.optim.SGD(watched[0].parameters(), lr=0.25)
        step(watched[0], optimizer, *watched[2:])
        watched[0](watched[2])  # a recorded step is open, its hooks are on the layers
        _, found = capture(graph, lambda: step(watched[0], optimizer, *watched[2:]))
    assert found == wanted
    assert session.hearing.notes == []


def test_what_the_check_would_see_without_care(graph):
    alone = parts()
    step(*alone)
    _, plain = capture(graph, lambda: step(*alone))
    _, more = capture(graph, lambda: (step(*alone), alone[2].sum()))
    assert more == [*plain, "aten.sum.default"]


@pytest.mark.parametrize("clip", [True, False])
def test_a_replay_of_a_whole_step_is_a_step(graph, tmp_path, clip):
    model, _, x, kept = parts()
    wanted = []
    with followed(tmp_path, every=2) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        step(model, optimizer, x, kept, clip)  # a warm-up is a step as any other
        g, _ = capture(graph, lambda: step(model, optimizer, x, kept, clip))
        fixed = {name: t.detach() for name, t in kept.items()}  # where CUDA would always write them

        def work():
            with session.hearing.nothing():  # Python does not run in a replay
                step(model, optimizer, x, kept, clip)
            for name, tensor in fixed.items():
                tensor.copy_(kept[name].detach())
            wanted.append({name: float(t) for name, t in fixed.items()})

        g.work = work
        for number in range(3):
            x.fill_(number)
            g.replay()
    assert session.facts()["steps"] == 4
    assert [writer.column("loss")[s] for s in (2, 3, 4)] == pytest.approx([row["loss"] for row in wanted])
    norms = [writer.column("grad_norm").get(s) for s in (2, 3, 4)]
    assert norms == (pytest.approx([row["norm"] for row in wanted]) if clip else [None] * 3)
    assert set(writer.column("lr").values()) == {0.25}
    assert list(writer.column("update_ratio")) == [2, 4]
    assert session.facts()["not_found"] == []
    assert [note for note in session.facts()["notes"] if note.startswith("The program replays its steps")]


def test_replays_of_two_optimizers_in_turns_say_whose_they_are(graph, tmp_path):
    with followed(tmp_path, every=2) as (_, writer):
        replays = []
        for _ in range(2):
            model, _, x, kept = parts()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
            one = functools.partial(step, model, optimizer, x, kept)
            one()
            replays.append((capture(graph, one)[0], one))  # the program holds what it replays
        for number in range(4):
            replays[number % 2][0].replay()
    assert writer.column("turn") == {2: 1, 3: 0, 4: 1, 5: 0, 6: 1}


def test_a_replay_of_a_backward_from_a_given_gradient_is_a_microbatch(graph, tmp_path):
    model, _, x, kept = parts()

    def work():
        y = model(x)
        y.backward(torch.ones_like(y))
        optimizer.step()

    with followed(tmp_path) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        step(model, optimizer, x, kept)
        g, _ = capture(graph, work)
        g.replay()
    assert writer.column("microbatches") == {1: 1, 2: 1}
    assert list(writer.column("loss")) == [1]
    assert session.hearing.notes == []


def test_a_graph_without_an_optimizer_is_no_step(graph, tmp_path):
    model, _, x, kept = parts()
    with followed(tmp_path) as (session, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        step(model, optimizer, x, kept)
        g, _ = capture(graph, lambda: model(x).sum().backward())
        for _ in range(3):
            g.replay()
            optimizer.step()
    assert session.facts()["steps"] == 4
    assert session.graphs.notes == []


def test_graphs_of_a_compiled_backward_are_replayed_in_a_thread_of_the_backward_pass(graph, tmp_path):
    model, _, x, _ = parts()
    with followed(tmp_path, compiling=True) as (session, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        g = graph()

        def record():
            g.capture_begin()
            g.capture_end()

        for work in (record, g.replay, g.replay):
            through_a_backward_thread(model(x).square().mean(), work).backward()
            optimizer.step()
    assert session.facts()["steps"] == 3
    assert session.hearing.notes == []


def test_the_step_limit_holds_for_replays(graph, tmp_path):
    model, _, x, kept = parts()
    replays = []

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        step(model, optimizer, x, kept)
        g, _ = capture(graph, lambda: step(model, optimizer, x, kept))
        g.work = lambda: replays.append(1)
        for _ in range(10):
            g.replay()

    with followed(tmp_path, steps=3) as (session, _), pytest.raises(SystemExit):
        train()
    assert (session.facts()["steps"], len(replays)) == (3, 2)


@cuda
@pytest.mark.gpu
def test_a_captured_step_on_a_gpu_is_watched_without_breaking_its_capture(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda")
    wanted, side = [], torch.cuda.Stream()
    with followed(tmp_path, every=2, judge="current", compiling=True) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train():
            optimizer.zero_grad(set_to_none=False)
            loss = (model(x) - x).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            optimizer.step()
            return loss, norm

        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(side)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            loss, norm = train()
        for _ in range(5):
            g.replay()
            torch.cuda.synchronize()
            wanted.append((loss.item(), norm.item()))
    assert session.facts()["steps"] == 8
    assert session.hearing.notes == []
    for at, name in enumerate(("loss", "grad_norm")):
        assert [writer.column(name)[s] for s in range(4, 9)] == pytest.approx([row[at] for row in wanted], rel=1e-5)
    assert list(writer.column("update_ratio")) == [2, 4, 6, 8]


@cuda
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the compiler says, and imports
def test_graphs_that_torch_compile_makes_are_not_disturbed_on_a_gpu(tmp_path):
    def train(steps=8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, mode="reduce-overhead")
        x, losses = torch.randn(32, 64, device="cuda"), []
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            loss = (compiled(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    alone = train()
    with followed(tmp_path, every=100, judge="current", compiling=True) as (session, writer):
        assert train() == alone
    assert list(writer.column("loss").values()) == pytest.approx(alone)
    assert session.hearing.notes == []
