"""torchao in its turn beside ours, on tiny shapes, its products emulated."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.bench.gemm import bench_gemm
from narrowgauge.bench.layers import layer_calls, layers
from narrowgauge.bench.operands import Tensors
from narrowgauge.bench.overhead import bench_overhead
from narrowgauge.bench.peer_casts import check_casts, peer_casts
from narrowgauge.bench.quantize import bench_quantize
from narrowgauge.bench.step import bench_step
from narrowgauge.errors import UsageError
from narrowgauge.scripts import gpt

pytest.importorskip("torchao.float8", exc_type=ImportError)
CPU = torch.device("cpu")
ROLES = ("input", "weight", "grad_output")


@pytest.fixture(autouse=True)
def _micro(monkeypatch):
    """What trains here is smaller than tiny."""
    micro = replace(gpt.SIZES["tiny"], dim=64, ffn=128, heads=2, kv_heads=1, layers=1, batch=2, seq=32)
    monkeypatch.setitem(gpt.SIZES, "tiny", micro)


def test_quantize_has_the_casts_of_every_operand_with_the_bytes_that_they_write():
    found = bench_quantize(CPU, recipes=("blockwise",), shapes=[(16, 128)], rounds=1, peer="torchao")
    rows = [row for row in found.rows if row["by"] == "torchao"]
    assert [(r["recipe"], r["operand"]) for r in rows] == [(k, r) for k in ("tensorwise", "rowwise") for r in ROLES]
    assert all(row["us"] > 0 and row["of_copy_pct"] > 0 and row["reads"] == 2 for row in rows)
    assert set(rows[0]) == set(found.rows[0])  # the same columns
    assert found.settings["peer"] == "torchao"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("role", ROLES)
def test_both_copies_are_codes_of_the_tensor_and_the_second_is_transposed(recipe, role):
    x = torch.randn(16, 128).bfloat16()
    plain, scale, turned, second = peer_casts(x)[recipe, role]()
    assert (plain.shape, turned.shape) == ((16, 128), (128, 16))
    assert plain.is_contiguous()
    assert turned.is_contiguous()
    assert tuple(scale.shape) == ((16, 1) if recipe == "rowwise" else ())
    assert tuple(second.shape) == ((1, 128) if recipe == "rowwise" else ())
    loss = 0.13 if plain.dtype == torch.float8_e5m2 else 0.07  # half an ulp, of 2 bits of mantissa or of 3
    for back in (plain.float() / scale, turned.float().t() / second):
        assert torch.allclose(back, x.float(), rtol=loss, atol=1e-3)


def test_gemm_has_whole_layers_beside_ours_and_counts_all_their_products():
    found = bench_gemm(CPU, shapes={"x": (16, 32, 16)}, rounds=1, peer="torchao")
    assert [row["gemm"] for row in found.rows] == ["fprop", "dgrad", "wgrad", "forward", "step"]
    for row, products in zip(found.rows[3:], (1, 3), strict=True):
        assert list(row["us"]) == ["bf16", "current", "rowwise", "blockwise", "torchao tensorwise", "torchao rowwise"]
        for kind, us in row["us"].items():
            assert row["tflops"][kind] == pytest.approx(2 * 16 * 32 * 16 * products / us / 1e6, rel=2e-3)


def test_every_layer_of_a_gemm_row_computes_the_layer():
    tensors = Tensors.random(32, 64, 128, CPU)
    every = layers(tensors, "torchao")
    kinds = {name: type(next(m for m in layer.modules() if hasattr(m, "weight"))) for name, layer in every.items()}
    assert {name: kind.__name__ for name, kind in kinds.items()} == {
        "bf16": "Linear", "current": "Fp8Linear", "rowwise": "Fp8Linear", "blockwise": "Fp8Linear",
        "torchao tensorwise": "Float8Linear", "torchao rowwise": "Float8Linear",
    }  # fmt: skip
    exact = {gemm: tensors.product(gemm)().float() for gemm in ("fprop", "dgrad", "wgrad")}

    def far(found, gemm):
        return float((found.float() - exact[gemm]).norm() / exact[gemm].norm())

    for name, forward in layer_calls(every, tensors, "forward").items():
        y = forward()
        assert not y.requires_grad
        assert far(y, "fprop") < 0.06, name
    for name, step in layer_calls(every, tensors, "step").items():
        dx, dw = step()
        assert far(dx, "dgrad") < 0.09, name
        assert far(dw, "wgrad") < 0.09, name


def test_overhead_watches_a_peers_layers_as_foreign_ones(monkeypatch):
    from narrowgauge.bench import overhead

    seen = []

    class Told(overhead.Watched):
        def close(self):
            super().close()
            seen.append((self.stepper.variant.name, self.collector.every, self.sites and " ".join(self.sites.notes)))

    monkeypatch.setattr(overhead, "Watched", Told)
    found = bench_overhead("tiny", CPU, recipes=("current",), mode="eager", rounds=1, peer="torchao")
    assert [row["recipe"] for row in found.rows] == ["current", "torchao tensorwise", "torchao rowwise"]
    for row in found.rows:
        assert row["failures"] == 0
        assert row["own_pct"] > 0  # something was looked at
        assert row["unwatched_ms"] > 0
        assert row["every_10_ms"] > 0
    foreign = [kind for kind in seen if kind[2] is not None]
    assert [kind[:2] for kind in foreign] == [(f"torchao {k}", n) for k in ("tensorwise", "rowwise") for n in (10, 1)]
    assert all(notes.startswith("Not seen as a weight in any recorded step: Embedding (1") for _, _, notes in foreign)


def test_a_peer_that_fails_costs_no_row_of_ours(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("out of\n luck")

    monkeypatch.setattr("narrowgauge.bench.variants.apply_peer", refuse)
    found = bench_overhead("tiny", CPU, recipes=("current",), mode="eager", rounds=1, peer="torchao")
    assert found.rows[0]["recipe"] == "current"
    assert found.rows[1:] == [
        {"recipe": f"torchao {name}", "error": "RuntimeError: out of luck"} for name in ("tensorwise", "rowwise")
    ]


def test_step_runs_where_torch_has_no_products_of_a_peer():
    found = bench_step("tiny", CPU, recipes=(), mode="eager", rounds=1, samples=1, brief=True, peer="torchao")
    assert [row["variant"] for row in found.rows] == ["bf16", "torchao tensorwise", "torchao rowwise"]
    assert all(4 < row["loss"] < 7 for row in found.rows)


def test_casts_are_compared_with_torchao_alone(monkeypatch):
    monkeypatch.setattr("narrowgauge.bench.peer_casts.check_peer", lambda name: None)
    with pytest.raises(UsageError, match="bench gemm compares with torchao alone; for transformerengine there are"):
        check_casts("gemm", "transformerengine")
