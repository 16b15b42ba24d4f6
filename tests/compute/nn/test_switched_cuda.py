"""On a GPU: what stays high is the plain layer's to the last bit, the rest the converted one's; compiled as well."""

import pytest
import torch
from torch import nn

import narrowgauge as ng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]
RESULTS = {"fprop": 0, "dgrad": 1, "wgrad": 2}


def run(recipe=None, high=(), compiled=False):
    """y, dx, dw, db of a layer in BF16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256)).cuda().bfloat16()
    if recipe is not None:
        ng.convert(model, recipe, high=high)
    x = torch.randn(4, 128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
    y = (torch.compile(model, fullgraph=True) if compiled else model)(x)
    y.backward(dy)
    return y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "blockwise"])
def test_each_product_is_the_plain_layers_or_the_converted_ones(recipe):
    plain, converted = run(), run(recipe)
    for gemm in RESULTS:
        found = run(recipe, [{"gemms": [gemm]}])
        for name, index in RESULTS.items():
            assert torch.equal(found[index], (plain if name == gemm else converted)[index]), (gemm, name)


def test_compiled_they_are_the_same_bits():
    high = [{"roles": ["grad_output"], "gemms": ["wgrad"]}]
    for a, b in zip(run("current", high), run("current", high, compiled=True), strict=True):
        assert torch.equal(a, b)


def test_bf16_gemms_on_fp8_tensors_are_those_of_the_fake_recipe():
    for a, b in zip(run("current", [{"keep": "bf16_gemm"}]), run("fake-current"), strict=True):
        assert torch.equal(a, b)
