"""CUDA graphs that a program makes by itself.

    captured    torch.cuda.CUDAGraph.capture_begin, _end        what is called in between runs once, and is recorded
    replayed    torch.cuda.CUDAGraph.replay                     without a call of anything in it
    graphed     torch.cuda.make_graphed_callables               modules and functions whose calls are replays from then
                transformer_engine.pytorch's                    on; it wants modules without hooks

torch.compile's own are in compiled_graphs.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from narrowgauge.session.doors.seams import Seams

TRANSFORMER_ENGINE = ("transformer_engine.pytorch.graph", "transformer_engine.pytorch")


class HearsGraphs(Protocol):
    """Hears of CUDA graphs."""

    def capture_begins(self) -> None:
        """A capture is about to begin."""

    def capture_ended(self, graph: Any) -> None:
        """It ended."""

    def replay_begins(self, graph: Any) -> None:
        """A graph is about to be replayed."""

    def replayed(self, graph: Any) -> None:
        """It was."""

    def graphed(self, callables: Any, make: Callable[[], Any]) -> Any:
        """Callables are to be graphed, by `make()`; returns what the program gets for them."""


def follow(seams: Seams, graphs: HearsGraphs) -> None:
    """Hear of them from now on."""

    def capture_begin(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> None:
            graphs.capture_begins()
            original(*args, **kwargs)

        return run

    def capture_end(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(graph: Any) -> None:
            original(graph)
            graphs.capture_ended(graph)

        return run

    def replay(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(graph: Any) -> None:
            graphs.replay_begins(graph)
            original(graph)
            graphs.replayed(graph)

        return run

    seams.replace(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    seams.replace(torch.cuda.CUDAGraph, "capture_end", capture_end)
    seams.replace(torch.cuda.CUDAGraph, "replay", replay)
    name = "make_graphed_callables"
    seams.replace(torch.cuda, name, _graphing(graphs), also=(torch.cuda.graphs, name))


def follow_transformer_engine(seams: Seams, graphs: HearsGraphs) -> bool:
    """Hear of those that TransformerEngine makes; False if the program has not loaded it yet."""
    owners = [sys.modules.get(name) for name in TRANSFORMER_ENGINE]
    if not all(hasattr(owner, "make_graphed_callables") for owner in owners):
        return False
    for owner in owners:
        seams.replace(owner, "make_graphed_callables", _graphing(graphs))
    return True


def _graphing(graphs: HearsGraphs) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def graphing(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(callables: Any, *args: Any, **kwargs: Any) -> Any:
            return graphs.graphed(callables, lambda: original(callables, *args, **kwargs))

        return run

    return graphing
