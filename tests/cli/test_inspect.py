"""`narrowgauge inspect`: what it prints, what it writes, and one message with exit code 2 for what it cannot do."""

import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.cli.inspect import ROLES
from narrowgauge.cli.main import main
from narrowgauge.cli.options import check_writable
from narrowgauge.compute import recipes
from narrowgauge.metrics import OPERAND_COLUMNS
from narrowgauge.observe.inspect import inspect, open_checkpoint, plain

DOCS = Path(__file__).parents[2] / "docs" / "inspect.md"


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    broken = torch.randn(32, 64, generator=generator)
    broken[1, 2] = math.nan
    save_file(
        {
            "up.weight": torch.randn(64, 32, generator=generator),
            "down.weight": broken,
            "up.bias": torch.ones(64),
            "q.weight": torch.ones(16, 16).to(torch.float8_e4m3fn),
            "q.weight_scale": torch.tensor(0.5),
            "exact": torch.ones(16, 16),
            "zeros": torch.zeros(16, 16),
        },
        "model.safetensors",
    )
    return "model.safetensors"


def said(capsys, *argv):
    main(["inspect", *argv])
    out = capsys.readouterr()
    assert out.err == ""
    return out.out


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *argv])
    out = capsys.readouterr()
    assert stop.value.code == 2
    assert "Traceback" not in out.err
    assert out.out == ""
    return out.err


def strict(text):
    """JSON as the standard has it, without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_the_roles_are_those_of_recipes():
    assert set(ROLES) == set(recipes.ROLES)


def test_a_pipe_gets_whole_lines(capsys, model):
    text = said(capsys, model)
    first, *_ = text.splitlines()
    assert first.startswith("model.safetensors: 7 tensors, 4.928k parameters, ")
    assert "NaN or Inf in 1 of 7 tensors" in text
    assert text == plain(inspect(open_checkpoint(Path(model))))


def test_json_is_everything(capsys, model):
    text = said(capsys, model, "--json")
    found = strict(text)
    assert {name: found[name] for name in ("schema", "file", "tensors", "looked_at", "parameters", "roles")} == {
        "schema": 2, "file": "model.safetensors", "tensors": 7, "looked_at": 7, "roles": ["weight"],
        "parameters": 64 * 32 * 2 + 64 + 3 * 16 * 16,
    }  # fmt: skip
    assert found["bytes"] == Path(model).stat().st_size
    assert found["dtypes"] == {"float32": 6, "float8_e4m3fn": 1}
    assert found["recipes"]["current"] == {
        "same": ["delayed", "static"],
        "operands": {"weight": {"format": "E4M3FN", "one_per": "tensor", "scaling": "current"}},
    }  # fmt: skip
    assert found["not_finite"] == ["down.weight"]
    assert set(found["worst"]) == set(found["recipes"])
    rows = {row["name"]: row for row in found["rows"]}
    up = rows["up.weight"]
    assert (up["kind"], up["role"], up["shape"], up["dtype"]) == ("matrix", "weight", [64, 32], "float32")
    assert up["best"] in up["recipes"]
    for recipe in found["recipes"]:
        assert {*up["metrics"], *up["recipes"][recipe]} - {"badness", "sign", "why"} == {*OPERAND_COLUMNS} - {
            "amax_ratio"
        }
    assert rows["q.weight"]["codes"] == {
        "format": "E4M3FN", "scale": "q.weight_scale", "one_per": "tensor",
        "codes_used": 1, "zeros": 0, "max": 0, "nan": 0, "inf": 0,
    }  # fmt: skip
    assert rows["exact"]["recipes"]["mxfp8"]["sqnr_db"] == "Infinity"
    assert rows["zeros"]["recipes"]["mxfp8"]["sqnr_db"] is None
    assert not {"recipes", "role"} & rows["up.bias"].keys()
    # One tensor per line, so that a line-wise tool can read a large one.
    assert sum(line.startswith("  {") for line in text.splitlines()) == 7


def test_out_has_the_same_json(capsys, model):
    page = said(capsys, model, "--out", "found.json")
    assert page == said(capsys, model)
    assert strict(Path("found.json").read_text()) == strict(said(capsys, model, "--json"))


def test_recipes_are_chosen_by_name(capsys, model):
    found = strict(said(capsys, model, "--recipes", "Blockwise, mxfp8", "--json"))
    assert list(found["recipes"]) == ["blockwise", "mxfp8"]
    found = strict(said(capsys, model, "--recipes", "delayed,current", "--json"))
    assert found["recipes"]["delayed"]["same"] == ["current"]


def test_a_role_and_a_glob(capsys, model):
    found = strict(said(capsys, model, "--role", "grad_output", "--only", "up", "--only", "ex*", "--json"))
    assert found["recipes"]["current"]["operands"]["grad_output"]["format"] == "E5M2"
    assert found["roles"] == ["grad_output"]
    assert [row["name"] for row in found["rows"]] == ["exact", "up.bias", "up.weight"]
    assert (found["tensors"], found["looked_at"]) == (7, 3)


def test_a_role_goes_before_what_the_names_of_a_dump_say(capsys, model):
    save_file({f"0:{role}.x": torch.randn(16, 16) for role in ROLES}, "dump.safetensors")
    found = strict(said(capsys, "dump.safetensors", "--json"))
    assert found["roles"] == ["input", "weight", "grad_output"]
    assert {row["name"]: row["role"] for row in found["rows"]} == {f"0:{role}.x": role for role in ROLES}
    assert {role: about["format"] for role, about in found["recipes"]["current"]["operands"].items()} == {
        "input": "E4M3FN", "weight": "E4M3FN", "grad_output": "E5M2",
    }  # fmt: skip
    found = strict(said(capsys, "dump.safetensors", "--role", "weight", "--json"))
    assert {row["role"] for row in found["rows"]} == {*found["roles"]} == {"weight"}


def test_top(capsys, model):
    assert "Matrices, the worst under current first (1 of 4): SQNR in dB" in said(capsys, model, "--top", "1")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "Missing argument 'FILE'"),
        (["modle.safetensors"], "there is no file modle.safetensors; did you mean 'model.safetensors'?"),
        (["."], "is a folder; name a file in it: class.pt, cut.safetensors, empty.pt, model.safetensors."),
        (["empty.pt"], "empty.pt is empty; expected safetensors, a torch checkpoint"),
        (["words.txt"], "words.txt begins with b'some wor', which nothing known here does"),
        (["cut.safetensors"], "cut.safetensors is no whole safetensors file"),
        (["class.pt"], "can only be read by running code that comes with it (it names `torch.nn"),
        (["model.safetensors", "--recipes", "curent"], "did you mean 'current'?"),
        (["model.safetensors", "--recipes", ","], "no recipe was named; expected for example"),
        (["model.safetensors", "--recipes", "current,rowwise,Current"], "current is named twice in --recipes"),
        (["model.safetensors", "--role", "output"], "'output' is not one of"),
        (
            ["model.safetensors", "--only", "upp.*"],
            "--only 'upp.*' matches no tensor of model.safetensors; near it: up.",
        ),
        (["model.safetensors", "--top", "0"], "0 is not in the range x>=1"),
        (
            ["model.safetensors", "--out", "/proc/none/a.json"],
            "--out: cannot write to /proc/none/a.json: No such file or directory",
        ),
        (["model.safetensors", "--out", "./model.safetensors"], "the very file to look at; give another one"),
    ],
)
def test_wrong_use_is_one_message_and_2(capsys, model, argv, says):
    Path("empty.pt").touch()
    Path("words.txt").write_text("some words")
    Path("cut.safetensors").write_bytes(Path(model).read_bytes()[:-1])
    torch.save(torch.nn.Linear(2, 2), "class.pt")
    before = Path(model).read_bytes()
    told = refused(capsys, *argv)
    assert says in told
    assert Path(model).read_bytes() == before


def test_a_refused_file_leaves_no_empty_json_behind(capsys, model):
    refused(capsys, "none.pt", "--out", "found.json")
    assert not Path("found.json").exists()


def test_what_is_at_out_stays_although_it_is_empty(model):
    Path("empty.json").touch()
    Path("link.json").symlink_to("to.json")
    for out in map(Path, ("empty.json", "link.json")):
        check_writable(out)
    assert Path("empty.json").exists()
    assert Path("link.json").is_symlink()
    assert not Path("to.json").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_at_out_is_opened_once(capsys, model):
    os.mkfifo("pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()), daemon=True)
    reader.start()
    page = said(capsys, model, "--json", "--out", "pipe")
    reader.join(10)
    assert read == [page]
    assert Path("pipe").is_fifo()


def test_help_loads_no_torch():
    code = (
        "import sys; from narrowgauge.cli.main import main\ntry: main(['inspect', '--help'])\n"
        "except SystemExit: pass\nassert not {'torch', 'numpy', 'safetensors', 'rich'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--recipes LIST" in done.stdout


def test_the_page_in_the_docs_is_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = DOCS.read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, DOCS.name, "exec"), {})
    assert printed.getvalue().strip() == shown.strip()
