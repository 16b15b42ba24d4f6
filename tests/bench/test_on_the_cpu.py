"""Every benchmark runs on tiny shapes: what it returns is complete, whatever the figures are."""

from dataclasses import replace
from weakref import ref

import pytest
import torch

from narrowgauge.bench import overhead, step, timing
from narrowgauge.bench.gemm import bench_gemm
from narrowgauge.bench.memory import Need, side_by_side
from narrowgauge.bench.operands import Tensors, quantizer, reads, written_bytes
from narrowgauge.bench.overhead import bench_overhead
from narrowgauge.bench.quantize import bench_quantize
from narrowgauge.bench.step import bench_step
from narrowgauge.bench.sweep import bench_sweep
from narrowgauge.compute.kernels import BACKENDS
from narrowgauge.compute.nn.conversion.speed_map import SpeedMap
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED, ROWWISE
from narrowgauge.scripts import gpt

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _micro(monkeypatch):
    """What trains here is smaller than tiny."""
    micro = replace(gpt.SIZES["tiny"], dim=64, ffn=128, heads=2, kv_heads=1, layers=2, batch=2, seq=32)
    monkeypatch.setitem(gpt.SIZES, "tiny", micro)


def test_quantize_has_a_row_per_operand_of_every_recipe():
    rows = bench_quantize(CPU, recipes=("current", "blockwise"), shapes=[(16, 128)], rounds=1).rows
    assert [(r["recipe"], r["operand"]) for r in rows[1:]] == [
        (recipe, role) for recipe in ("current", "blockwise") for role in ("input", "weight", "grad_output")
    ]
    assert rows[0]["by"] == "copy"
    assert rows[0]["of_copy_pct"] == 100
    assert all(row["us"] > 0 for row in rows)


def test_bytes_are_counted_once_per_buffer():
    x = torch.randn(128, 256).bfloat16()
    reference = BACKENDS["reference"]
    shared = quantizer(CURRENT, "input", x, reference)()
    assert written_bytes(*shared) == x.numel() + 4  # one copy of codes, and one scale
    rows = quantizer(ROWWISE, "input", x, reference)()
    assert written_bytes(*rows) == 2 * x.numel() + 4 * (128 + 256)


def test_a_tensor_is_read_twice_where_its_scale_needs_all_of_it():
    assert [reads(recipe, "input") for recipe in (CURRENT, DELAYED, ROWWISE, BLOCKWISE)] == [2, 1, 2, 1]


def test_gemm_has_a_row_per_product_and_says_what_it_left_out():
    found = bench_gemm(CPU, shapes={"x": (16, 32, 16)}, rounds=1)
    assert [row["gemm"] for row in found.rows] == ["fprop", "dgrad", "wgrad"]
    assert set(found.rows[0]["tflops"]) == {"bf16", "fp16", "fp32"}
    assert "blockwise: not measured, this device has no native FP8 product of that kind." in found.notes


def test_products_are_what_their_names_say():
    t = Tensors.random(8, 6, 4, CPU, torch.float32)
    shapes = {gemm: tuple(t.product(gemm)().shape) for gemm in ("fprop", "dgrad", "wgrad")}
    assert shapes == {"fprop": (8, 6), "dgrad": (8, 4), "wgrad": (6, 4)}


def test_a_sweep_is_a_map_that_convert_can_read(tmp_path):
    found = bench_sweep(CPU, recipes=("current", "delayed"), tokens=(16, 32), sides=(128,), rounds=1)
    assert len(found.rows) == 4
    for row in found.rows:
        assert row["step"] <= row["step_gemm"]
    path = tmp_path / "map.json"
    path.write_text(found.to_json())
    assert SpeedMap.read(path).speedup("delayed", 16, 128, 128) == pytest.approx(found.rows[1]["step"])


def test_step_compares_every_variant_with_bf16():
    kept = []
    found = bench_step(
        "tiny", CPU, recipes=("current",), precisions=("fp32",), mode="eager", rounds=1, samples=1, keep=kept.append
    )
    assert [result.rows for result in kept] == [found.rows] * 4  # a CPU has no energy and no phases to add
    assert [row["variant"] for row in found.rows] == ["bf16", "fp32", "current"]
    assert found.rows[0]["x_bf16"] == 1
    assert all(4 < row["loss"] < 7 for row in found.rows)
    assert found.notes == ["energy: no energy counter on 'cpu'"]
    assert found.settings["vocab"] == 256


def test_a_variant_that_fails_is_a_row_with_its_reason(monkeypatch):
    from narrowgauge.bench import variants

    def refuse(*args, **kwargs):
        raise RuntimeError("out of\n luck")

    monkeypatch.setattr(variants, "convert", refuse)
    found = bench_step("tiny", CPU, recipes=("current",), mode="eager", rounds=1, samples=1)
    assert found.rows[1] == {"variant": "current", "error": "RuntimeError: out of luck"}
    assert found.rows[0]["variant"] == "bf16"


def test_overhead_watches_every_step_and_every_tenth():
    kept = []
    found = bench_overhead("tiny", CPU, recipes=("current",), mode="eager", rounds=1, keep=kept.append)
    [row] = found.rows
    assert [result.rows for result in kept] == [found.rows]
    assert (len(kept[0].notes), len(found.notes)) == (1, 0)  # that more was to come
    assert row["recipe"] == "current"
    assert row["failures"] == 0
    assert row["every_1_ms"] > 0
    assert "every_10_overhead_pct" in row


def test_what_an_earlier_variant_left_in_cycles_is_gone_before_memory_is_read(monkeypatch):
    class Stepper(overhead.Stepper):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.myself = self
            made.append(ref(self))

    def allocated(device):
        kept.append([stepper().variant.name for stepper in made if stepper() is not None])
        return 0

    made, kept = [], []
    monkeypatch.setattr(overhead, "Stepper", Stepper)
    monkeypatch.setattr(overhead, "allocated", allocated)
    bench_overhead("tiny", CPU, recipes=("current", "rowwise"), mode="eager", rounds=1)
    assert kept == [["current"] * n for n in range(3)] + [["rowwise"] * n for n in range(3)]


def test_timing_leaves_the_matmul_precision_alone():
    before = torch.get_float32_matmul_precision()
    bench_gemm(CPU, shapes={"x": (16, 16, 16)}, rounds=1)
    assert torch.get_float32_matmul_precision() == before
    assert timing.summarize([1.0]).samples == 1


def test_what_is_compiled_in_the_first_recorded_steps_is_not_what_watching_costs(monkeypatch):
    def call(self):
        original(self)
        if self.steps == 12 and self.collector.every == 1:
            self.collector.seconds += 1e6

    original = overhead.Watched.__call__
    monkeypatch.setattr(overhead.Watched, "__call__", call)
    [row] = bench_overhead("tiny", CPU, recipes=("current",), mode="eager", rounds=1).rows
    assert 0 < row["own_pct"] < 1000


def test_a_step_needs_room_beside_what_the_others_hold():
    small, large = Need(10, 30), Need(20, 70)
    assert side_by_side([small, large], total=100)
    assert not side_by_side([small, small, large], total=97)  # 20 held, 70 at a peak, 8% to spare
    assert side_by_side([small, small, large], total=98)
    assert side_by_side([small] * 6, total=100)  # peaks come one after the other


@pytest.mark.parametrize("at_once", [2, 3])
def test_what_does_not_fit_at_once_is_measured_in_groups_beside_bf16(monkeypatch, at_once):
    groups = []
    measured = step._measure

    def note(group, *args):
        groups.append([built.stepper.variant.name for built in group])
        measured(group, *args)

    monkeypatch.setattr(step, "_measure", note)
    monkeypatch.setattr(step, "_fits", lambda needs, device: len(needs) <= at_once)
    rows = bench_step("tiny", CPU, mode="eager", recipes=("current", "rowwise"), precisions=("fp32",), rounds=1).rows
    assert [row["variant"] for row in rows] == ["bf16", "fp32", "current", "rowwise"]
    assert all(row["ms"] > 0 for row in rows)
    want = {
        2: [["bf16", "fp32"], ["bf16", "current"], ["bf16", "rowwise"]],
        3: [["bf16", "fp32", "current"], ["bf16", "rowwise"]],
    }
    assert groups == want[at_once]


def test_what_took_more_than_was_guessed_is_measured_apart(monkeypatch):
    groups = []
    measured, built = step._measure, step._build

    def build(variant, *args):
        found = built(variant, *args)
        found.peak_bytes, found.resting = (90 if variant.name == "fp32" else 20), 10
        return found

    def note(group, *args):
        groups.append([built.stepper.variant.name for built in group])
        measured(group, *args)

    monkeypatch.setattr(step, "_build", build)
    monkeypatch.setattr(step, "_measure", note)
    monkeypatch.setattr(step, "_fits", lambda needs, device: side_by_side(needs, total=112))
    bench_step("tiny", CPU, mode="eager", recipes=("current",), precisions=("fp16", "fp32"), rounds=1)
    assert groups == [["bf16", "fp16"], ["bf16", "fp32"], ["bf16", "current"]]
