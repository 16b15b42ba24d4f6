"""A step of CUDA graphs is the same step: its results stay what they were when other variants' graphs run."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.bench import watched
from narrowgauge.bench.shapes import sized
from narrowgauge.bench.variants import Stepper, Variant

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
VARIANTS = (Variant("bf16"), Variant("current", recipe="current"), Variant("rowwise", recipe="rowwise"))


def losses(mode, turns=5):
    """Every variant's losses, each read only after all have taken their turn."""
    steppers = [Stepper(variant, sized("tiny"), torch.device("cuda"), mode) for variant in VARIANTS]
    seen = []
    for _ in range(turns):
        for stepper in steppers:
            stepper()
        seen.append([stepper.loss.item() for stepper in steppers])
    return seen


@cuda
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_ordinary_launches():
    found, want = losses("cuda-graphs"), losses("compiled")
    assert torch.tensor(found).sub(torch.tensor(want)).abs().max() < 1e-3
    assert len({tuple(row) for row in want}) == len(want)  # every step has a batch of its own


def test_a_recorded_step_replays_nothing(tmp_path, monkeypatch):
    told = []

    @contextmanager
    def launched():
        told.append("launched")
        yield

    monkeypatch.setattr(watched, "launched", launched)
    model, _ = ng.convert(nn.Sequential(nn.Linear(32, 32)), "current")

    def step():
        told.append("step")

    step.model, step.variant = model, Variant("current", recipe="current")
    call = watched.Watched(step, every=2, folder=tmp_path / "run")
    for _ in range(4):
        call()
    call.close()
    assert told == ["step", "launched", "step", "step", "launched", "step"]
