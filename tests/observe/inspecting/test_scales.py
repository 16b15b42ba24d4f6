"""FP8 tensors: which scale is theirs, what it covers, and what is in their codes."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.compute.quant import Block, PerColumn, PerRow, PerTensor
from narrowgauge.observe.inspect import inspect, open_checkpoint, walk
from narrowgauge.observe.inspect.scales import granularity_of, scale_of


def looked(tensors, path):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return {row.entry.name: row for row in inspect(open_checkpoint(path)).rows}


def codes(M=256, K=384, dtype=torch.float8_e4m3fn, seed=0):
    return (torch.randn(M, K, generator=torch.Generator().manual_seed(seed)) * 100).clamp(-240, 240).to(dtype)


def steps(*shape):
    """Scales that are all different."""
    return 0.001 * (1 + torch.arange(math.prod(shape), dtype=torch.float32)).reshape(shape)


SCALES = {
    "tensor": (steps(), lambda s: s.reshape(1, 1).expand(256, 384)),
    "row": (steps(256, 1), lambda s: s.expand(256, 384)),
    "column": (steps(1, 384), lambda s: s.expand(256, 384)),
    "128x128": (steps(2, 3), lambda s: s.repeat_interleave(128, 0).repeat_interleave(128, 1)),
    "1x128": (steps(256, 3), lambda s: s.repeat_interleave(128, 1)),
    "1x32": (steps(256, 12), lambda s: s.repeat_interleave(32, 1)),
}


@pytest.mark.parametrize("run", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("one_per", SCALES)
def test_codes_are_decoded_with_their_scale(tmp_path, monkeypatch, one_per, dtype, run):
    monkeypatch.setattr(walk, "RUN", run)
    q, (scale, spread) = codes(dtype=dtype), SCALES[one_per]
    rows = looked({"a.weight": q, "a.weight_scale": scale, "a.bias": torch.ones(256)}, tmp_path / "a.safetensors")
    row = rows["a.weight"]
    x = q.double() * spread(scale).double()
    assert (row.kind, row.codes["one_per"], row.codes["scale"]) == ("codes", one_per, "a.weight_scale")
    assert row.own["amax"] == pytest.approx(float(x.abs().max()), rel=1e-6)
    assert row.own["std"] == pytest.approx(float(x.std(correction=0)), rel=1e-6)
    assert row.own["mean"] == pytest.approx(float(x.mean()), rel=1e-5)
    assert (row.own["scale_min"], row.own["scale_max"]) == (float(scale.min()), float(scale.max()))
    assert row.became == {}  # and never quantized again
    assert {name: r.kind for name, r in rows.items()} == {
        "a.weight": "codes", "a.weight_scale": "scale", "a.bias": "vector",
    }  # fmt: skip


def test_codes_are_counted(tmp_path):
    raw = torch.tensor([[0x00, 0x80, 0x7E, 0xFE], [0x7F, 0xFF, 0x01, 0x38]], dtype=torch.uint8)
    row = looked({"w": raw.view(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")["w"]
    found = {name: row.codes[name] for name in ("format", "codes_used", "zeros", "max", "nan", "inf")}
    assert found == {"format": "E4M3FN", "codes_used": 8, "zeros": 2, "max": 2, "nan": 2, "inf": 0}
    assert row.own["nan_count"] == row.not_finite == 2
    assert (row.own["amax"], row.own["amin"]) == (448, 2**-9)
    assert row.note == "no scale was found: looked at as if it were 1"


def test_infinities_of_e5m2(tmp_path):
    raw = torch.tensor([0x7C, 0xFC, 0x7B, 0x7D, 0x3C], dtype=torch.uint8)
    row = looked({"w": raw.view(torch.float8_e5m2)}, tmp_path / "a.safetensors")["w"]
    assert {name: row.codes[name] for name in ("max", "nan", "inf")} == {"max": 1, "nan": 1, "inf": 2}
    assert (row.own["nan_count"], row.own["inf_count"]) == (1, 2)


def test_scales_that_are_powers_of_two_in_a_byte(tmp_path):
    q, exponents = codes(4, 64), torch.tensor([[120, 121], [122, 123], [124, 125], [126, 127]], dtype=torch.uint8)
    x = q.double() * (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 1)
    for scale in (exponents, exponents.view(torch.float8_e8m0fnu)):
        rows = looked({"w": q, "w_scale": scale}, tmp_path / "a.safetensors")
        assert rows["w"].codes["one_per"] == "1x32"
        assert rows["w"].own["l2"] == pytest.approx(float(x.norm()), rel=1e-6)
        assert (rows["w_scale"].own["amin"], rows["w_scale"].own["amax"]) == (2**-7, 1)


def test_a_scale_that_is_no_number_shows(tmp_path):
    scale = torch.ones(4, 1)
    scale[2] = math.nan
    rows = looked({"w": codes(4, 64), "w_scale": scale}, tmp_path / "a.safetensors")
    assert (rows["w"].own["nan_count"], rows["w_scale"].own["nan_count"]) == (64, 1)


def test_a_scale_that_does_not_fit_is_said_and_not_used(tmp_path):
    q = codes(4, 64)
    row = looked({"w": q, "w_scale": torch.full((3, 5), 0.5)}, tmp_path / "a.safetensors")["w"]
    assert row.note == "w_scale [3, 5] does not fit [4, 64]: looked at as if it were 1"
    assert (row.codes["scale"], row.codes["one_per"]) == ("", "")
    assert row.own["amax"] == float(q.float().abs().max())


@pytest.mark.parametrize("shape", [(), (7,), (0, 4)], ids=str)
def test_codes_of_any_shape(tmp_path, shape):
    q = torch.ones(shape).to(torch.float8_e4m3fn)
    row = looked({"w": q, "w_scale": torch.tensor(0.5)}, tmp_path / "a.safetensors")["w"]
    assert row.kind == ("codes" if q.numel() else "empty")
    if q.numel():
        assert row.own["amax"] == 0.5


def test_experts_in_one_tensor(tmp_path):
    q, scale = codes(512, 128).reshape(4, 128, 128), steps(4, 1, 1)
    row = looked({"experts": q, "experts_scale": scale}, tmp_path / "a.safetensors")["experts"]
    assert row.codes["one_per"] == "128x128"
    assert row.own["l2"] == pytest.approx(float((q.double() * scale.double()).norm()), rel=1e-6)


def test_parameters_are_codes_and_not_scales(tmp_path):
    save_file({"w": codes(4, 64), "w_scale": torch.ones(4, 1), "b": torch.ones(4)}, tmp_path / "a.safetensors")
    assert inspect(open_checkpoint(tmp_path / "a.safetensors")).parameters == 4 * 64 + 4


def test_a_scale_is_found_though_only_its_codes_were_asked_for(tmp_path):
    save_file({"a.w": codes(4, 64), "a.w_scale": torch.tensor(0.25)}, tmp_path / "a.safetensors")
    [row] = inspect(open_checkpoint(tmp_path / "a.safetensors"), only=["a.w"]).rows
    assert row.own["scale_max"] == 0.25


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("a.weight", ["a.weight_scale"], "a.weight_scale"),
        ("a.weight", ["a.weight_scale", "a.weight_scale_inv"], "a.weight_scale_inv"),
        ("a.weight", ["a.weight.scale_inv"], "a.weight.scale_inv"),
        ("a.weight", ["a.weight._scale"], "a.weight._scale"),
        ("a.weight", ["a.scale"], "a.scale"),
        ("a.weight", ["a.scale_weight"], "a.scale_weight"),
        ("a.weight._data", ["a.weight._scale_inv"], "a.weight._scale_inv"),
        ("dump.codes", ["dump.scale"], "dump.scale"),
        ("weight", ["scale"], "scale"),
        ("a.weight", ["a.input_scale", "b.weight_scale", "a.weight_scale_2"], ""),
        ("a.up", ["a.scale"], ""),  # beside several tensors it is anyone's
    ],
)
def test_the_names_of_scales(name, known, found):
    assert scale_of(name, known) == found


@pytest.mark.parametrize(
    ("scale", "of", "granularity"),
    [
        ((), (4, 6), PerTensor()),
        ((1, 1), (4, 6), PerTensor()),
        ((4,), (4, 6), PerRow()),
        ((6,), (4, 6), PerColumn()),
        ((4,), (4, 4), PerRow()),
        ((8,), (8, 2, 3, 3), Block(6, 3)),
        ((8, 1, 1, 1), (8, 2, 3, 3), Block(6, 3)),
        ((8, 2), (8, 2, 3), PerRow()),
        ((3, 2), (300, 200), Block(128, 128)),
        ((3, 2), (3, 200), Block(1, 128)),
        ((2, 1), (256, 128), Block(128, 128)),
        ((2, 2), (200, 400), Block(100, 200)),
        ((5, 2, 1), (5, 256, 128), Block(128, 128)),
        ((5, 2, 1), (5, 201, 128), None),  # blocks would reach from one expert into the next
        ((3, 5), (4, 6), None),
        ((0,), (4, 6), None),
        ((4, 6, 1, 1), (4, 6), None),
        ((3,), (96,), Block(1, 32)),
    ],
    ids=str,
)
def test_what_a_scale_covers(scale, of, granularity):
    assert granularity_of(scale, of) == granularity


def test_every_code_means_what_torch_says(tmp_path):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    row = looked({"w": every}, tmp_path / "a.safetensors")["w"]
    values = every.float().numpy()
    assert row.codes["codes_used"] == 256
    assert row.own["l2"] == pytest.approx(float(np.sqrt(np.nansum(values.astype(float) ** 2))), rel=1e-6)
