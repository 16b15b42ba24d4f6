"""The moments of a result in one read are those of many passes."""

import math

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused.watched.result import look_at_result
from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.results import _values

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(37, 301, generator=g)
    yield "normal", x
    yield "low", x.bfloat16()
    yield "half", x.half()
    yield "tiny", x * 1e-30
    yield "huge", x * 1e37
    yield "shifted", x * 1e-3 + 1000
    yield "one", torch.tensor([3.0])
    broken = x.clone()
    broken[0, 0], broken[3, 4], broken[-1, -1] = math.nan, math.inf, -math.inf
    yield "broken", broken
    yield "nothing finite", torch.full((5,), math.nan)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "y"), list(tensors()), ids=[name for name, _ in tensors()])
def test_the_same_moments(name, y):
    y = y.to(DEVICE)
    out = torch.from_numpy(MOMENTS.empty()[: MOMENTS.head_width]).to(DEVICE)
    look_at_result(y, out)
    for slot, want in _values(y.double().float().reshape(-1, y.shape[-1])).items():
        found = out[MOMENTS.offsets[slot]].item()
        assert found == pytest.approx(float(want), rel={"m2": 1e-4, "mean": 1e-5}.get(slot, 1e-6)), slot
    untouched = [slot.name for slot in MOMENTS.head if slot.name not in _values(y.float().reshape(-1, y.shape[-1]))]
    for slot in untouched:
        assert out[MOMENTS.offsets[slot]].item() == MOMENTS.empty()[MOMENTS.offsets[slot]]
