"""A step of CUDA graphs is the same step: its results stay what they were when other variants' graphs run."""

import pytest
import torch

from narrowgauge.bench.shapes import sized
from narrowgauge.bench.variants import Stepper, Variant

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]
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


def test_losses_are_those_of_ordinary_launches():
    found, want = losses("cuda-graphs"), losses("compiled")
    assert torch.tensor(found).sub(torch.tensor(want)).abs().max() < 1e-3
    assert len({tuple(row) for row in want}) == len(want)  # every step has a batch of its own
