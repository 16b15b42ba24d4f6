"""Graphs of recorded steps on a GPU: inductor's kernels, and CUDA graphs in the steps between."""

import copy

import numpy as np
import pytest
import torch
from tests.session.sites import compiled_programs
from tests.session.sites.compiled_programs import EVERY, STEPS, Net, compiled, notes, train, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of TF32 and of graphs that it leaves out
]
RECORDED = STEPS // EVERY
WAYS = {"kernels": {}, "CUDA graphs": {"mode": "reduce-overhead"}}


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = compiled_programs.tokens_of
    monkeypatch.setattr(compiled_programs, "tokens_of", lambda *which: plain(*which).cuda())


@pytest.fixture
def replays(monkeypatch):
    """How often a CUDA graph was replayed."""
    counted, replay = [0], torch.cuda.CUDAGraph.replay

    def count(graph):
        counted[0] += 1
        return replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    return counted


def alike(one, other):
    """The same rows; kernels that are merged round otherwise, and a value in a thousand falls into another code."""
    names = ("numel", "amax", "mean", "std", "sqnr_db")
    a, b = one.tensors(names), other.tensors(names)
    assert a["site"].tolist() == b["site"].tolist()
    assert a["step"].tolist() == b["step"].tolist()
    assert a["numel"].tolist() == b["numel"].tolist()
    assert len(a["step"]) == RECORDED * 9  # three layers, three operands each
    for name in ("amax", "std"):
        np.testing.assert_allclose(b[name], a[name], rtol=1e-3, err_msg=name)
    assert np.all(np.abs(b["mean"] - a["mean"]) < 1e-3 * np.asarray(a["std"]))
    np.testing.assert_allclose(b["sqnr_db"], a["sqnr_db"], atol=0.1)


@pytest.mark.parametrize("how", ["module", "blocks", "function"])
@pytest.mark.parametrize("way", WAYS)
def test_what_graphs_show_is_what_uncompiled_steps_show(how, way, tmp_path, replays):
    net, options = Net(blocks=1).cuda(), WAYS[way]
    twin = copy.deepcopy(net)
    alone = train(twin, compiled(twin, how, "inductor", **options))
    replayed, replays[0] = replays[0], 0
    assert (replayed > 0) == (way == "CUDA graphs")
    losses, uncompiled = watched(tmp_path / "uncompiled", net, how, "inductor", "uncompiled", options)
    replays[0] = 0
    found, graphs = watched(tmp_path / "graphs", net, how, "inductor", "graphs", options)
    assert losses == pytest.approx(alone, rel=1e-3)
    assert found == pytest.approx(alone, rel=1e-3)
    assert notes(uncompiled) == notes(graphs) == []
    assert graphs.meta["watch"]["steps_in_graphs"] == RECORDED - 1
    alike(uncompiled, graphs)
    assert (replays[0] > 0) == (way == "CUDA graphs")  # steps that are not recorded still are theirs
