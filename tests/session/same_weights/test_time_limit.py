"""A signal that comes while a snapshot is taken: the error of the program's handler is the program's."""

from __future__ import annotations

import signal

import pytest
import torch

from narrowgauge.session.same_weights import comparison, probe, tape

from .programs import RoundedVariant, make_probe, watched
from .test_measured import mlp


class TookTooLong(Exception):
    """Of the program."""


def stop(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise TookTooLong


def interrupted(*_, **__):
    signal.raise_signal(signal.SIGALRM)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
@pytest.mark.parametrize(
    ("where", "name"),
    [(tape, "tensors"), (probe, "_trained"), (comparison, "counted"), (RoundedVariant, "put_on")],
    ids=["recorded", "at backward", "FLOPs", "a recipe"],
)
def test_a_time_limit_that_ends_in_a_snapshot_ends_what_the_program_does(monkeypatch, where, name):
    measuring, model, before = make_probe(steps=(1,)), mlp(), signal.signal(signal.SIGALRM, stop)
    weights = [p.detach().clone() for p in model.parameters()]
    try:
        with watched(measuring, model):
            assert measuring.armed(1)
            monkeypatch.setattr(where, name, interrupted)
            with pytest.raises(TookTooLong):
                model(torch.randn(12, 16)).square().mean().backward()
            monkeypatch.undo()
            model.zero_grad()
            model(torch.randn(12, 16)).square().mean().backward()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), weights, strict=True))
    assert all(type(m).__name__ != "Rounded" for m in model.modules())
