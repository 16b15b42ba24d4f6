"""On a GPU: dumps are copied without waiting for the device, and hold what its kernels made."""

import pytest
import torch
from safetensors.torch import load_file
from tests.waiting import no_waiting
from torch import nn

import narrowgauge as ng
from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.session.dumps import Dumper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]


class Door:
    """An observer that only dumps."""

    def __init__(self, dumper):
        self.dumper = dumper

    def wants(self, module):
        return self.dumper.wants(module)

    def look(self, module, role, x, rule, turned):
        return None

    def operand(self, module, role, x, q, moments=None, amax_ratio=None):
        self.dumper.operand(module, role, x, q)

    def result(self, module, role, y, check):
        pass


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_what_was_multiplied_is_in_the_file_and_nothing_waited(tmp_path, recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256)).cuda().bfloat16()
    ng.convert(model, recipe)
    table = {"sites": ["*"], "steps": [[1, 3]], "roles": ["input", "weight", "grad_output"], "cap": 1 << 30}
    dumper = Dumper([table], None, tmp_path)
    set_observer(model, Door(dumper))
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for step in (1, 2, 3):
        dumper.begin_step(step)
        with no_waiting(step == 3):
            model(x).sum().backward()
        dumper.end_step()
    dumper.flush()
    assert dumper.failure == ""
    dumped = load_file(tmp_path / "dumps" / "step00000003-rank0.safetensors")
    assert torch.equal(dumped["0:input.x"], x.detach().cpu())
    rule = getattr(ng.recipes, recipe.upper()).fprop.a
    q = ng.quantize(x.detach().cpu(), rule.fmt, granularity=rule.granularity, scaling=rule.scaling)
    assert torch.equal(dumped["0:input.codes"].view(torch.uint8), q.codes.view(torch.uint8))
    assert torch.equal(dumped["0:input.scale"], q.scale)
    assert dumped["0:grad_output.x"].shape == (256, 256)
