"""A recorded step of converted layers replays no CUDA graph that torch.compile has made."""

import inspect
import sys
import types
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.session.inline import followed
from torch import nn

from narrowgauge.compute.recipes import ROLES
from narrowgauge.session.doors.compiled_graphs import launched

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Manager:
    """As torch's; it asks itself before each call of a compiled function."""

    def exceed_rerecord_limit(self, node_id, function_id):
        return False


@pytest.fixture
def graphs(monkeypatch):
    """Whether graphs are replayed now."""
    trees = types.ModuleType("torch._inductor.cudagraph_trees")
    trees.CUDAGraphTreeManager = type("Manager", (Manager,), dict(vars(Manager)))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", types.ModuleType("compile_fx"))
    return lambda: not trees.CUDAGraphTreeManager().exceed_rerecord_limit(None, 0)


def test_meanwhile_nothing_is_replayed(graphs):
    assert graphs()
    with launched():
        assert not graphs()
        with launched():
            assert not graphs()
        assert not graphs()
    assert graphs()


def test_the_empty_graph_before_the_first_is_not_heard(graphs):
    made, heard = [], [True]

    @contextmanager
    def unheard():
        heard[0] = False
        yield
        heard[0] = True

    manager = sys.modules["torch._inductor.cudagraph_trees"].CUDAGraphTreeManager
    manager.__init__ = first = lambda self, device: made.append((device, heard[0]))
    with launched(unheard):
        manager(0)
        assert heard == [True]
    assert manager.__init__ is first
    manager(1)
    assert made == [(0, False), (1, True)]


def test_a_step_in_which_torch_makes_room_for_graphs_stays_recorded(graphs, tmp_path, monkeypatch):
    trees = sys.modules["torch._inductor.cudagraph_trees"]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {"capture_begin": lambda graph: None}))
    torch.cuda.CUDAGraph.capture_end = torch.cuda.CUDAGraph.replay = lambda graph: None

    def room(manager):
        torch.cuda.CUDAGraph().capture_begin()

    trees.CUDAGraphTreeManager.__init__ = room
    with followed(tmp_path, recipe="current", judge="current", every=1, compiling=True) as (_, writer):
        model = nn.Sequential(nn.Linear(32, 32))
        torch.compile(lambda x: x, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.register_forward_pre_hook(lambda *_: trees.CUDAGraphTreeManager() and None)
        for _ in range(2):
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
    found = {(step, site) for step, sites, _ in writer.tensors for site in sites}
    assert found >= {(step, f"0:{role}") for step in (1, 2) for role in ROLES}


def test_a_torch_without_them_is_left_alone(graphs, monkeypatch):
    trees = sys.modules["torch._inductor.cudagraph_trees"]
    del trees.CUDAGraphTreeManager
    with launched():
        assert not hasattr(trees, "CUDAGraphTreeManager")


def test_where_nothing_can_be_captured_nothing_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", None)  # to import it is an error
    with launched():
        pass


def test_torch_asks_before_it_replays():
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    manager = trees.CUDAGraphTreeManager
    assert list(inspect.signature(manager.exceed_rerecord_limit).parameters) == ["self", "node_id", "function_id"]
    run = inspect.getsource(manager._run)
    assert run.index("exceed_rerecord_limit") < run.index("execute_node")


@pytest.mark.parametrize("recipe", ["current", ""])
def test_only_recorded_steps_of_converted_layers_do_without(graphs, tmp_path, recipe):
    seen, watch = [], {"compiled": "uncompiled"}
    with followed(tmp_path, recipe=recipe or None, judge="current", every=2, compiling=True, watch=watch):
        model = nn.Sequential(nn.Linear(32, 32))
        torch.compile(lambda x: x, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            loss = model(torch.ones(4, 32)).sum()
            seen.append(graphs())
            loss.backward()
            optimizer.step()
            assert graphs()
    assert seen == ([True, False, True, False] if recipe else [True] * 4)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's, of an input
def test_what_was_compiled_before_does_without_where_the_step_runs_uncompiled(graphs, tmp_path):
    """Converted layers may be in it, and would be silent. From its first call on, and no longer than the step."""

    def backend(graph, inputs):
        def run(*args):
            inside.append(graphs())
            return graph.forward(*args)

        return run

    inside, before, watch = [], [], {"compiled": "uncompiled"}
    torch._dynamo.reset()
    older = torch.compile(lambda x: 2 * x, backend=backend)
    with followed(tmp_path, judge="current", every=2, compiling=True, watch=watch):
        model = nn.Sequential(nn.Linear(32, 32))
        torch.compile(lambda x: x, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            y = model(torch.ones(4, 32))
            before.append(graphs())
            (older(y) + older(y)).sum().backward()
            optimizer.step()
            assert graphs()
    assert before == [True] * 4
    assert inside == [True, True, False, False] * 2


def rows(tmp_path, mode, every):
    """Losses of a small converted model, and what was recorded of it."""
    torch.manual_seed(0)
    with followed(tmp_path, recipe="current", judge="current", every=every, compiling=True) as (session, writer):
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, mode=mode)
        generator, losses = torch.Generator("cuda").manual_seed(1), []
        for _ in range(9):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
            loss = (compiled(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    found = {}
    for step, sites, columns in writer.tensors:
        for at, site in enumerate(sites):
            found[step, site] = {name: np.asarray(column[at], float) for name, column in columns.items()}
    return losses, found, session


@cuda
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, 3])
def test_layers_whose_steps_are_cuda_graphs_are_recorded_as_without(tmp_path, every):
    losses, found, session = rows(tmp_path / "graphs", "reduce-overhead", every)
    wanted_losses, wanted, _ = rows(tmp_path / "launches", None, every)
    assert losses == wanted_losses
    assert found.keys() == wanted.keys()
    assert {step for step, _ in found} == set(range(every, 10, every))
    assert {"0:input", "0:weight", "0:grad_output", "2:input"} <= {site for _, site in found}
    for key, row in wanted.items():
        for name, value in row.items():
            np.testing.assert_allclose(found[key][name], value, rtol=1e-6, err_msg=f"{key} {name}")
    assert session.hearing.notes == []
