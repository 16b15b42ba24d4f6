"""The compared models are exactly those that others are measured on."""

import torch

from narrowgauge.bench import shapes
from narrowgauge.bench.gemm import default_shapes
from narrowgauge.scripts import gpt


def test_sizes_compared_have_the_vocabulary_of_the_comparison():
    assert shapes.sized("8b-slice").vocab == shapes.sized("1b").vocab == 32768
    assert shapes.sized("tiny") == gpt.SIZES["tiny"]


def test_linear_shapes_are_those_of_the_model():
    size = gpt.SIZES["tiny"]
    block = gpt.Llama(size).blocks[0]
    found = {
        name.rpartition(".")[2]: tuple(p.weight.shape) for name, p in block.named_modules() if hasattr(p, "weight")
    }
    expected = shapes.linear_shapes(size)
    assert {name: found[name] for name in expected} == expected


def test_the_8b_slice_is_known_by_its_products():
    found = shapes.products(shapes.sized("8b-slice"))
    assert found["gate_up"] == (8192, 28672, 4096)
    assert found["qkv"] == (8192, 6144, 4096)


def test_its_quantized_products_are_85_8_tflop():
    linear, rest = shapes.step_flops(shapes.sized("8b-slice"))
    assert round(linear / 1e12, 1) == 85.8
    assert rest > 6 * 8192 * 32768 * 4096


def test_a_gpu_measures_both_models_and_a_cpu_one_small_shape():
    assert len(default_shapes(torch.device("cuda"))) == 8
    assert list(default_shapes(torch.device("cpu"))) == ["small"]
