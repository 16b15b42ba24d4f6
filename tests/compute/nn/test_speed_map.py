"""skip_slow: layers that a map calls slower stay high with the reason; where no map holds, a line says so."""

import json

import pytest
import torch
from torch import nn

from narrowgauge.compute.nn import convert
from narrowgauge.compute.nn.conversion import speed_map
from narrowgauge.compute.nn.conversion.speed_map import SlowLayers, SpeedMap
from narrowgauge.compute.recipes import CURRENT, STATIC
from narrowgauge.errors import ConversionError

POINTS = {(m, k, n): 0.5 if k * n <= 64 * 64 else 2.0 for m in (16, 8192) for k in (64, 256) for n in (64, 256)}
MAP = SpeedMap("made up", {"current": POINTS}, "2026-01-01")


def model():
    return nn.ModuleDict({"narrow": nn.Linear(64, 64), "wide": nn.Linear(256, 256)})


def rows(value):
    return [{"recipe": "current", "M": m, "K": k, "N": n, "step": value} for m in (1, 2) for k in (4,) for n in (8,)]


def test_slow_layers_stay_high_and_the_report_says_why():
    _, report = convert(model(), "current", skip_slow=MAP)
    found = {row.name: (row.recipe, row.reason) for row in report.rows}
    assert found["narrow"] == (None, "skip_slow: current is 0.50x BF16 at M=8192, K=64, N=64")
    assert found["wide"][0] == "current"
    assert report.notes == (
        "skip_slow: layers slower than BF16 stay high, by the map of made up, 2026-01-01, at 8192 tokens (assumed; "
        "tokens= says otherwise).",
    )


def test_tokens_can_be_said():
    points = {(m, 64, 64): 0.5 if m == 16 else 2.0 for m in (16, 8192)}
    fast = SpeedMap("made up", {"current": points})
    _, report = convert(model(), "current", skip_slow=fast)
    assert len(report.converted) == 2
    with pytest.raises(ConversionError, match=r"0\.50x BF16 at M=16, K=64, N=64"):  # none is left
        convert(model(), "current", skip_slow=fast, tokens=16)


def test_without_it_speed_is_not_judged():
    _, report = convert(model(), "current")
    assert len(report.converted) == 2
    assert report.notes == ()


def test_on_a_cpu_a_line_says_that_nothing_was_judged():
    _, report = convert(model(), "current", skip_slow=True)
    assert len(report.converted) == 2
    [note] = report.notes
    assert note.startswith("skip_slow: the model is on 'cpu', where FP8 is emulated and no map holds")
    assert note in str(report)


def test_on_a_gpu_without_a_map_a_line_says_how_to_draw_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Made Up")
    slow = SlowLayers(True)
    assert slow.reason(CURRENT, 64, 64, torch.device("cuda")) is None
    [note] = slow.notes()
    assert "there is no map of NVIDIA Made Up" in note
    assert "narrowgauge bench gemm --sweep --out FILE" in note


def test_a_recipe_that_is_not_on_the_map_is_said():
    slow = SlowLayers(MAP)
    assert slow.reason(STATIC, 64, 64, torch.device("cpu")) is None
    assert "the map of made up has no recipe 'static' (it has current)" in slow.notes()[0]


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        ((16, 64, 64), 0.5),
        ((8192, 256, 256), 2.0),
        ((16, 128, 64), 1.0),  # half way between 0.5 and 2 in logarithms
        ((1, 1, 1), 0.5),  # the nearest edge
        ((10**6, 10**6, 10**6), 2.0),
    ],
)
def test_between_grid_points_it_interpolates_and_outside_the_edge_holds(shape, value):
    assert MAP.speedup("current", *shape) == pytest.approx(value)


def test_the_shipped_map_is_whole_and_plausible():
    found = speed_map.shipped()["NVIDIA H200"]
    found.check()
    assert set(found.points) == {"current", "delayed", "rowwise", "blockwise"}
    for recipe in found.points:
        assert found.speedup(recipe, 8192, 14336, 8192) > 1.1
        assert found.speedup(recipe, 8192, 512, 512) < 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no speed map (JSONDecodeError"),
        (json.dumps({"hardware": "x", "rows": [{"recipe": "current"}]}), "is no speed map (KeyError: 'step')"),
        (json.dumps({"hardware": "x", "rows": []}), "a speed map without a point says nothing"),
        (json.dumps({"hardware": "x", "rows": rows(0.0)}), "current at M, K, N = (1, 4, 8) is no speed-up"),
        (
            json.dumps(
                {"hardware": "x", "rows": [*rows(1.0), {"recipe": "current", "M": 1, "K": 9, "N": 8, "step": 1}]}
            ),
            "current at M, K, N = (2, 9, 8) is missing",
        ),
    ],
)
def test_a_file_that_is_no_map_is_refused(tmp_path, content, says):
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(ConversionError) as error:
        SpeedMap.read(path)
    assert says in str(error.value)


def test_wrong_arguments_leave_the_model_as_it_was():
    plain = model()
    with pytest.raises(ConversionError, match=r"tokens=0: it counts the rows of a layer's input, so 1 or more\."):
        convert(plain, "current", skip_slow=MAP, tokens=0)
    with pytest.raises(ConversionError, match="tokens=8 is only used by skip_slow"):
        convert(plain, "current", tokens=8)
    assert type(plain["wide"]) is nn.Linear
