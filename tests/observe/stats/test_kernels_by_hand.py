"""What a GPU's kernels count of two microbatches is what the integrations have by hand of tensors on a GPU."""

import json

import pytest
import torch
from tests.integrations import by_hand_sums
from tests.integrations.differences import TOLERANCES, differences, finished
from tests.integrations.watched import _row

from narrowgauge.compute.recipes import CURRENT
from narrowgauge.metrics import finalize
from narrowgauge.observe.stats.held import Held

pytest.importorskip("triton")

from narrowgauge.compute.kernels.fused.watched.looks import Looks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("role", "dtype", "rows", "columns"),
    [("input", torch.float8_e4m3fn, 128, 96), ("grad_output", torch.float8_e5m2, 512, 128)],
    ids=["small", "the largest that is taken as a whole"],
)
def test_every_statistic_of_two_microbatches(monkeypatch, role, dtype, rows, columns):
    monkeypatch.setattr(by_hand_sums, "on_cpu", lambda x: False)  # an interpreted kernel takes what one on a GPU does
    looks, generator = Looks(DEVICE), torch.Generator().manual_seed(0)
    there, sums = Held(1, 0, lambda: looks), by_hand_sums.Sums(1)
    for size in (1.0, 8.0):
        loud = torch.linspace(-6, 0, columns).exp2()[torch.randperm(columns, generator=generator)]
        x = (size * loud * torch.randn(rows, columns, generator=generator) ** 3).to(DEVICE)
        assert there.judge_there(f"a:{role}", role, x, CURRENT.uses(role)[0], None)
        sums.add(x, dtype)
    _, packed = there.operands(looks)
    names = (*TOLERANCES, "exponent_histogram")
    table = finalize(packed.cpu().numpy(), columns=names)
    found = _row({name: table[name].tolist() for name in names}, 0)
    want = finished(json.loads(json.dumps(sums.row())))
    assert want["sampled"] == 2 * rows * columns
    assert differences({(1, role): found}, {(1, role): want}) == []
