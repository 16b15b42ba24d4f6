"""Every number, computed here once more from the same tensors with nothing but numpy and torch's casts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.compute.recipes import BLOCKWISE, CATALOG, CURRENT, ROWWISE
from narrowgauge.errors import UsageError
from narrowgauge.observe.inspect import inspect, open_checkpoint, plain, walk

MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def looked(tensors, path, **options):
    save_file(tensors, path)
    return {row.entry.name: row for row in inspect(open_checkpoint(path), **options).rows}


def spread(amax, shape, rows, cols):
    """One number per block -> one per element."""
    return np.repeat(np.repeat(amax, rows, 0), cols, 1)[: shape[0], : shape[1]]


def granule_amax(x, rows, cols):
    M, K = x.shape
    return np.array(
        [[np.abs(x[i : i + rows, j : j + cols]).max() for j in range(0, K, cols)] for i in range(0, M, rows)]
    )


def inverse(recipe, x, dtype):
    """The factor of every element, by the recipe's rule, in float32."""
    M, K = x.shape
    block = {"current": (M, K), "rowwise": (1, K), "blockwise": (128, 128), "mxfp8": (1, 32), "tile": (1, 128)}[recipe]
    amax = np.float32(granule_amax(x, *block))
    factor = np.float32(MAX[dtype]) / np.where(amax > 0, amax, 1)
    if recipe in ("blockwise", "mxfp8", "tile"):
        factor = np.float32(2.0) ** np.floor(np.log2(factor.astype(np.float64)))
    return spread(factor, x.shape, *block).astype(np.float32)


def by_hand(recipe, tensor, dtype=torch.float8_e4m3fn):
    """What a recipe makes of a matrix."""
    x = tensor.float().numpy()
    factor = inverse(recipe, x, dtype)
    scaled = torch.from_numpy((x * factor).clip(-MAX[dtype], MAX[dtype])).to(dtype).double().numpy()
    d = scaled * (1 / factor).astype(np.float32).astype(np.float64)
    x = x.astype(np.float64)
    flushed = (scaled == 0) & (x != 0)
    error = (x - d) ** 2
    per_row = 10 * np.log10((x**2).sum(1) / error.sum(1))
    return {
        "sqnr_db": 10 * np.log10((x**2).sum() / error.sum()),
        "mse": error.mean(),
        "underflow_pct": 100 * flushed.mean(),
        "saturation_pct": 100 * (np.abs(x) * factor > MAX[dtype] * (1 + 2**-20)).mean(),
        "gain": (x * d).sum() / (x * x).sum(),
        "lost_energy_pct": 100 * (x[flushed] ** 2).sum() / (x**2).sum(),
        "p5_row_sqnr_db": np.percentile(per_row, 5),
    }


def matrix(M=257, K=300, seed=0):
    """A matrix with an outlier row, a tiny column and zeros; no side is a multiple of anything."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed)) * 0.02
    x[3] *= 40
    x[:, 5] *= 1e-5
    x[7, 10:20] = 0
    return x


def assert_same(found, want):
    for name, value in want.items():
        # Percentiles are read from histograms of half a decibel.
        close = {"abs": 0.5} if name.startswith("p5") else {"rel": 1e-6, "abs": 1e-12}
        assert found[name] == pytest.approx(value, **close), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise", "mxfp8"])
def test_what_each_recipe_would_make_of_a_weight(tmp_path, recipe, dtype):
    x = matrix().to(dtype)
    row = looked({"w": x}, tmp_path / "a.safetensors")["w"]
    assert_same(row.became[recipe], by_hand(recipe, x))


@pytest.mark.parametrize("run", [1, 1 << 12, 1 << 20])
def test_the_runs_that_a_tensor_is_walked_in_change_nothing(tmp_path, monkeypatch, run):
    monkeypatch.setattr(walk, "RUN", run)
    x = matrix(700)
    row = looked({"w": x}, tmp_path / "a.safetensors")["w"]
    for recipe in ("current", "rowwise", "blockwise", "mxfp8"):
        assert_same(row.became[recipe], by_hand(recipe, x))
    wide = x.double().numpy()
    energy = (wide - wide.mean()) ** 2
    assert_same(row.own, {"std": wide.std(), "kurtosis": (energy**2).mean() / energy.mean() ** 2, "mean": wide.mean()})
    assert sum(row.own["exponent_histogram"]) == x.numel()


def test_a_gradient_is_quantized_as_gradients_are(tmp_path):
    x = matrix()
    row = looked({"g": x}, tmp_path / "a.safetensors", role="grad_output")["g"]
    assert_same(row.became["current"], by_hand("current", x, torch.float8_e5m2))
    assert_same(row.became["blockwise"], by_hand("tile", x))


def test_more_dimensions_are_rows_of_the_last(tmp_path):
    x = matrix(256, 96)
    rows = looked({"flat": x, "deep": x.reshape(4, 8, 8, 96).clone()}, tmp_path / "a.safetensors")
    assert repr(rows["flat"].became) == repr(rows["deep"].became)
    assert repr(rows["flat"].own) == repr(rows["deep"].own)


@pytest.mark.parametrize("shape", [(70, 130), (9100,), (1, 9100)], ids=str)
def test_a_tensors_own_numbers(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(walk, "RUN", 1024)
    x = matrix(70, 130).reshape(shape)
    row = looked({"t": x}, tmp_path / "a.safetensors")["t"]
    wide = x.double().numpy().reshape(-1)
    energy = (wide - wide.mean()) ** 2
    want = {
        "numel": 9100,
        "amax": np.abs(wide).max(),
        "amin": np.abs(wide[wide != 0]).min(),
        "mean": wide.mean(),
        "std": wide.std(),
        "l2": np.sqrt((wide**2).sum()),
        "nan_count": 0,
        "inf_count": 0,
        "kurtosis": (energy**2).mean() / energy.mean() ** 2,
    }
    assert row.kind == ("vector" if len(shape) == 1 else "matrix")
    assert_same(row.own, want)
    binades = np.floor(np.log2(np.abs(wide[wide != 0]))).astype(int)
    counts = row.own["exponent_histogram"]
    assert counts[0] == (wide == 0).sum()
    assert counts[1:] == [int((binades == e).sum()) for e in range(-96, 31)]


def test_a_scalar(tmp_path):
    row = looked({"s": torch.tensor(-2.5)}, tmp_path / "a.safetensors")["s"]
    assert (row.own["amax"], row.own["mean"], row.own["numel"]) == (2.5, -2.5, 1)
    assert row.became == {}


def test_recipes_with_the_same_rule_are_tried_once(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": matrix()}, path)
    rules = {role: inspect(open_checkpoint(path), role=role).rules for role in ("weight", "input", "grad_output")}
    for found in rules.values():
        assert [(rule.name, rule.same) for rule in found] == [
            ("current", ("delayed", "static")), ("rowwise", ()), ("blockwise", ()), ("mxfp8", ()), ("mxfp8-ocp", ()),
        ]  # fmt: skip
        assert {name for rule in found for name in (rule.name, *rule.same)} == set(CATALOG)
    assert rules["grad_output"][0].operands["grad_output"].fmt.name == "E5M2"
    [rule] = inspect(open_checkpoint(path), recipes=[ROWWISE]).rules
    assert rule.name == "rowwise"


def test_a_recipe_that_quantizes_twice_is_looked_at_as_it_goes_forward(tmp_path):
    save_file({"w": matrix()}, tmp_path / "a.safetensors")
    mixed = replace(ROWWISE, name="mixed", dgrad=BLOCKWISE.dgrad)
    [row] = inspect(open_checkpoint(tmp_path / "a.safetensors"), recipes=[mixed]).rows
    assert_same(row.became["mixed"], by_hand("rowwise", matrix()))


def test_an_unknown_role(tmp_path):
    save_file({"w": matrix()}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=r"no role 'wieght' that a recipe quantizes; did you mean 'weight'\?"):
        inspect(open_checkpoint(tmp_path / "a.safetensors"), role="wieght")


def test_no_recipe_at_all(tmp_path):
    save_file({"w": matrix()}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="no recipe was given; expected at least one"):
        inspect(open_checkpoint(tmp_path / "a.safetensors"), recipes=[])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_and_inf_are_counted_and_spoil_no_more_than_their_granule(tmp_path, dtype):
    x = matrix(256, 256).to(dtype)
    x[0, 0], x[0, 1], x[200, 3] = math.nan, -math.inf, math.inf
    row = looked({"w": x}, tmp_path / "a.safetensors", recipes=[CURRENT, ROWWISE, BLOCKWISE])["w"]
    assert (row.own["nan_count"], row.own["inf_count"], row.not_finite) == (1, 2, 3)
    wide = x.double()
    assert row.own["amax"] == wide[wide.isfinite()].abs().max()
    assert math.isnan(row.became["current"]["sqnr_db"])  # its one scale is poisoned
    healthy = [i for i in range(256) if i not in (0, 200)]
    assert row.became["rowwise"]["sqnr_db"] == pytest.approx(by_hand("rowwise", x[healthy])["sqnr_db"], rel=1e-6)
    assert row.best == ""


def test_nothing_but_nan(tmp_path):
    row = looked({"w": torch.full((4, 4), math.nan)}, tmp_path / "a.safetensors")["w"]
    assert row.not_finite == 16
    assert math.isnan(row.own["mean"])
    assert row.best == ""


def test_zeros_have_no_sqnr_and_no_trouble(tmp_path):
    row = looked({"w": torch.zeros(32, 32)}, tmp_path / "a.safetensors")["w"]
    assert math.isnan(row.became["current"]["sqnr_db"])
    assert {judged.sign for judged in row.judged.values()} == {None}
    assert row.best == ""


def test_a_tensor_that_lies_askew_in_memory(tmp_path):
    x = matrix()
    torch.save({"turned": x.t(), "part": x[:, 3:200], "again": x.expand(2, *x.shape)}, tmp_path / "a.pt")
    rows = {row.entry.name: row for row in inspect(open_checkpoint(tmp_path / "a.pt")).rows}
    assert_same(rows["turned"].became["rowwise"], by_hand("rowwise", x.t().contiguous()))
    assert_same(rows["part"].became["blockwise"], by_hand("blockwise", x[:, 3:200].contiguous()))
    assert rows["again"].own["numel"] == 2 * x.numel()


@pytest.mark.parametrize("shape", [(48, 32, 3), (48, 32, 3, 3), (64, 16, 1, 1), (32, 3, 16, 16), (16, 8, 2, 3, 3)])
@pytest.mark.parametrize("recipe", [CURRENT, ROWWISE, BLOCKWISE])
def test_a_convolutions_weight_is_what_it_multiplies(tmp_path, shape, recipe):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    row = looked({"conv.weight": weight}, tmp_path / "a.safetensors", recipes=[recipe])["conv.weight"]
    rows = np.ascontiguousarray(np.moveaxis(weight.numpy(), 1, -1)).reshape(shape[0], -1)
    wanted = by_hand(recipe.name, torch.from_numpy(rows))
    assert {name: row.became[recipe.name][name] for name in ("sqnr_db", "gain")} == pytest.approx(
        {name: wanted[name] for name in ("sqnr_db", "gain")}, rel=1e-6
    )
    assert row.entry.shape == shape
    text = plain(inspect(open_checkpoint(tmp_path / "a.safetensors"), recipes=[recipe]))
    assert "Taken for weights of convolutions, a row being all that makes one output: conv.weight." in text


@pytest.mark.parametrize(("shape", "role"), [((4, 24, 16), None), ((2, 3, 40, 64), None), ((6, 32, 8), "input")])
def test_experts_and_activations_are_rows_of_their_last_dimension(tmp_path, shape, role):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    row = looked({"x": x}, tmp_path / "a.safetensors", recipes=[ROWWISE], role=role)["x"]
    wanted = by_hand("rowwise", x.reshape(-1, shape[-1]))
    assert row.became["rowwise"]["sqnr_db"] == pytest.approx(wanted["sqnr_db"], rel=1e-6)
    assert "convolutions" not in plain(inspect(open_checkpoint(tmp_path / "a.safetensors"), role=role))
