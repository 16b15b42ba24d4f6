"""The page: what a reader sees first, that it fits, and that no name can break it."""

import math

import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.compute.recipes import BLOCKWISE, CURRENT
from narrowgauge.observe.inspect import inspect, open_checkpoint, plain
from narrowgauge.observe.inspect.tables import amount, db, db_of_bins, fold, many, number, shown


def random(*shape, seed=0):
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def page(tensors, path, top=20, width=100, **options):
    torch.save(tensors, path) if path.suffix == ".pt" else save_file(tensors, path)
    return plain(inspect(open_checkpoint(path), **options), top, width)


def section(text, title):
    """The lines of a table, from its titles to the blank line behind it."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next(i for i in range(start, len(lines)) if i + 1 == len(lines) or not lines[i + 1])
    return lines[start + 1 : end + 1]


@pytest.fixture
def model(tmp_path):
    outlier = random(256, 4096)
    outlier[:, 7] *= 2e5
    broken = random(64, 64)
    broken[0, 0], broken[0, 1] = math.nan, math.inf
    w = random(128, 64, seed=1)
    content = {
        "model": {"up.weight": w, "down.weight": outlier, "q.weight": broken, "norm": torch.ones(64), "head.weight": w},
        "optimizer": {"state": {0: {"exp_avg": random(8, 8)}}, "param_groups": []},
        "odd": random(310, 64).double(),
        "mask": torch.ones(3, dtype=torch.bool),
        "none": torch.zeros(0, 3),
        "fp8.weight": random(32, 32).to(torch.float8_e4m3fn),
        "fp8.weight_scale": torch.tensor(0.5),
        "bare.weight": torch.ones(32, 32).to(torch.float8_e5m2),
    }
    return page(content, tmp_path / "model.pt")


def test_the_first_line_is_the_file(model, tmp_path):
    first = model.splitlines()[0]
    size = amount((tmp_path / "model.pt").stat().st_size, 1024, (" bytes", " KiB", " MiB"))
    parameters = 128 * 64 + 256 * 4096 + 64 * 64 + 64 + 310 * 64 + 2 * 32 * 32
    assert first == (
        f"model.pt: 12 tensors, {amount(parameters, 1000, ('', 'k', 'M'))} parameters, {size}:"
        " fp32 8, fp64 1, bool 1, E4M3FN 1, E5M2 1"
    )


def test_nan_and_inf_come_first(model):
    assert section(model, "NaN or Inf in 1 of 12 tensors") == [
        "tensor          shape  NaN  Inf     of",
        "model.q.weight  64x64    1    1  4,096",
    ]
    assert model.index("NaN or Inf") < model.index("What each recipe")


def test_every_recipe_has_its_line_with_the_worst_tensors_numbers(model):
    titles, *lines = section(model, "What each recipe would do to 4 matrices as weight")
    assert titles.split("  ")[0] == "recipe"
    rows = {line.split()[0]: line.split() for line in lines}
    assert list(rows) == ["current", "rowwise", "blockwise", "mxfp8", "mxfp8-ocp"]
    assert (rows["current"][1], rows["current"][3]) == ("tensor", "1!")
    assert float(rows["current"][2]) == pytest.approx(31.5, abs=0.3)
    assert rows["mxfp8"][3] == "0"


def test_matrices_are_ordered_by_the_first_recipe_and_say_the_best(model):
    titles, *lines = section(model, "Matrices, the worst under current first: SQNR in dB")
    assert titles.split() == ["tensor", "shape", "current", "rowwise", "blockwise", "mxfp8", "mxfp8-ocp", "best"]
    assert [line.split()[0] for line in lines] == ["model.down.weight", "model.up.weight", "odd", "model.q.weight"]
    assert [line.split()[-1] for line in lines] == ["blockwise", "current", "current", "—"]
    assert lines[0].split()[2].endswith("!")
    assert "   current: model.down.weight\n      a twentieth of its columns have" in model


def test_fp8_is_shown_as_what_it_is(model):
    titles, *lines = section(model, "FP8 already")
    assert titles.split("  ")[0] == "tensor"
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["fp8.weight"][1:4] == ["32x32", "E4M3FN", "tensor"]
    assert rows["bare.weight"][2:5] == ["E5M2", "no", "scale!"]
    assert "bare.weight: no scale was found: looked at as if it were 1." in model


def test_what_else_a_reader_should_know(model):
    for line in (
        "delayed and static: like current, while the amax stays what it is.",
        "A side is no multiple of 16, so no FP8 unit takes it: odd.",
        "Scales of FP8 tensors, read with them: fp8.weight_scale.",
        "Tied to others and counted once: model.head.weight (it is model.up.weight).",
        "Without elements: none.",
        "Left out: mask (it is bool).",
        "An optimizer's, which no recipe quantizes: 1 tensor; --json has their statistics.",
        "Looked at as float32: 1 float64 tensor.",
    ):
        assert f"\n{line}\n" in model


def test_one_recipe_shows_every_number(tmp_path):
    text = page({"w": random(64, 64)}, tmp_path / "a.safetensors", recipes=[BLOCKWISE])
    titles, line = section(text, "Matrices, the worst under blockwise first")
    assert titles.split("  ")[0] == "tensor"
    for title in ("SQNR dB", "p5 row", "p5 col", "under %", "sat %", "lost %", "gain"):
        assert title in titles
    assert line.split()[:2] == ["w", "64x64"]


def test_each_tensor_of_a_dump_is_looked_at_as_the_role_in_its_name(tmp_path):
    names = ("0:weight.x", "0:input.x", "0:input@1.x", "0:grad_output.x", "0:output.x", "grad_output.x")
    text = page({name: random(256, 256, seed=i) for i, name in enumerate(names)}, tmp_path / "a.safetensors")
    titles = [line for line in text.splitlines() if line.startswith("What each recipe would do to")]
    assert titles == [
        "What each recipe would do to 2 matrices as input",
        "What each recipe would do to 3 matrices as weight",
        "What each recipe would do to 1 matrix as grad_output",
    ]
    per = [next(line for line in section(text, title) if line.startswith("blockwise")).split()[1] for title in titles]
    assert per == ["1x128", "128x128", "1x128"]
    titles, *lines = section(text, "Matrices, the worst under current first: SQNR in dB")
    assert titles.split()[:3] == ["tensor", "as", "shape"]
    assert {line.split()[1] for line in lines[:1]} == {"grad_output"}  # E5M2 has a bit less
    assert sorted(line.split()[1] for line in lines) == ["grad_output", "input", "input"] + ["weight"] * 3
    asked = page({names[0]: random(16, 16)}, tmp_path / "b.safetensors", role="grad_output", recipes=[CURRENT])
    assert "What each recipe would do to 1 matrix as grad_output" in asked
    assert section(asked, "Matrices")[0].split()[:2] == ["tensor", "shape"]


def test_of_one_recipe_the_role_is_shown_as_well(tmp_path):
    tensors = {"0:weight.x": random(16, 16), "0:grad_output.x": random(16, 16)}
    text = page(tensors, tmp_path / "a.safetensors", recipes=[BLOCKWISE])
    titles, *lines = section(text, "Matrices, the worst under blockwise first")
    assert titles.split()[:5] == ["tensor", "as", "shape", "SQNR", "dB"]
    assert {line.split()[1] for line in lines} == {"weight", "grad_output"}


def test_top_is_how_many_rows_a_table_has(tmp_path):
    tensors = {f"w{i}": random(16, 16, seed=i) for i in range(9)} | {f"v{i}": random(16) for i in range(9)}
    tensors |= {f"n{i}": torch.full((2,), math.nan) for i in range(9)}
    text = page(tensors, tmp_path / "a.safetensors", top=4)
    for title in ("NaN or Inf in 9 of 27 tensors (4 of 9)", "Matrices", "Vectors, the largest first (4 of 18)"):
        assert len(section(text, title)) == 1 + 4


def test_nothing_at_all(tmp_path):
    text = page({}, tmp_path / "a.safetensors")
    assert (
        text
        == f"a.safetensors: 0 tensors, 0 parameters, {(tmp_path / 'a.safetensors').stat().st_size} bytes: nothing\n"
    )


def test_only_is_said(tmp_path):
    text = page({"a": random(16, 16), "b": random(16)}, tmp_path / "a.safetensors", only=["a"])
    assert "Looked at 1 tensor, as --only says; 1 more are in the file." in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_long_names_are_whole_however_little_room_there_is(tmp_path, width):
    long = "model.language_model.decoder.layers.{}.self_attention.linear_query_key_value_projection.weight"
    names = [start + long.format(i) for i in range(3) for start in ("", "my")] + ["x" * 500]
    tensors = {name: random(64, 16, seed=i) for i, name in enumerate(names)}
    tensors |= {name.replace("weight", "bias"): random(16) for name in names[:3]}
    text = page(tensors, tmp_path / "a.safetensors", width=width)
    assert max(map(len, text.splitlines())) <= max(width, 96)  # what the numbers of the widest table need
    lines = section(text, "Matrices")[1:]
    shown = "".join(line if line == line.lstrip() else line[2:] for line in lines)
    assert all(name in shown for name in names)
    assert "…" not in text


def test_without_a_width_each_row_is_a_line(tmp_path):
    names = ["a" * 200, "a" * 100 + "b" + "a" * 99]
    text = page({name: random(16, 16) for name in names}, tmp_path / "a.safetensors", width=None, recipes=[CURRENT])
    assert [line.split()[0] for line in section(text, "Matrices")[1:]] == names
    assert len({line.index("16x16") for line in section(text, "Matrices")[1:]}) == 1


def test_a_table_of_200_tensors_with_names_that_a_terminal_would_obey(tmp_path):
    tensors = {f"\x1b[31m[red]{i}\n\x07": random(16, 16, seed=i) for i in range(200)}
    text = page(tensors, tmp_path / "a.safetensors", top=200, recipes=[CURRENT])
    lines = section(text, "Matrices")
    assert len(lines) == 201
    assert all(line.startswith("\\x1b[31m[red]") for line in lines[1:])
    assert "\x1b" not in text
    assert "\x07" not in text


def test_an_empty_name_is_shown_as_one(tmp_path):
    text = page({"": random(16, 16), "a.weight": random(16, 16)}, tmp_path / "a.safetensors", recipes=[CURRENT])
    assert {line.split()[0] for line in section(text, "Matrices")[1:]} == {'""', "a.weight"}
    assert "Tied" not in text


@pytest.mark.parametrize(
    ("name", "room", "lines"),
    [
        ("layers.0.mlp.up.weight", 40, ["layers.0.mlp.up.weight"]),
        ("model.layers.11.mlp.down_proj.weight", 30, ["model.layers.11.mlp.down_proj.", "  weight"]),
        ("model.layers.11.mlp.down_proj.weight", 12, ["model.", "  layers.11.", "  mlp.", "  down_proj.", "  weight"]),
        ("abcdefghijklmnop", 7, ["abcdefg", "  hijkl", "  mnop"]),
        ("層" * 5, 6, ["層層層", "  層層"]),
    ],
)
def test_names_are_folded_behind_their_dots(name, room, lines):
    assert fold(name, room).splitlines() == lines


def test_numbers_as_words():
    assert [db(value) for value in (31.52, math.inf, -math.inf, math.nan)] == ["31.5", "exact", "none", "—"]
    assert [db_of_bins(value) for value in (31.52, math.inf, -math.inf)] == ["31.5", ">=80", "<-40"]
    assert [number(value) for value in (0.0, 1e-7, 1234567.0, math.nan)] == ["0", "1e-07", "1.23e+06", "—"]
    assert [many(n, "matrix", "matrices") for n in (1, 2000)] == ["1 matrix", "2,000 matrices"]
    assert [amount(n, 1000, ("", "k", "M")) for n in (0, 999, 1000, 124_439_808)] == ["0", "999", "1k", "124.4M"]
    assert shown("a\tb\u202e") == "a\\tb\\u202e"
