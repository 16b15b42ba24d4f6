"""Dumps: what is in the files, bit by bit; which steps and sites; the cap; what goes wrong is told and hurts nobody."""

import json
import os
import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from tests.session import programs
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.inspect import inspect, open_checkpoint, plain
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.session.attach import Session
from narrowgauge.session.dumps.choice import size
from narrowgauge.session.plan import Plan

ROLES = ["input", "weight", "grad_output"]


def table(sites=("*",), steps=((1, 1),), roles=ROLES, cap=1 << 30):
    return {"sites": list(sites), "steps": [list(span) for span in steps], "roles": list(roles), "cap": cap}


def follow(folder, *tables, **plan):
    """The facts of BASIC's run, watched with these `[[dump]]` tables."""
    script = folder / "train.py"
    script.write_text(programs.BASIC)
    plan = Plan("x", str(folder / "out"), ("train.py",), dump=tables, every=100, **plan)
    writer = RunWriter(plan.folder, {})
    session = Session(plan, writer)
    kept, sys.argv = sys.argv, ["train.py", "3"]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = kept
        session.finish()
        writer.close()
    return session.facts()


def files(folder):
    return sorted(path.name for path in (folder / "out" / "dumps").iterdir())


def read(folder, step):
    return load_file(folder / "out" / "dumps" / f"step{step:08d}-rank0.safetensors")


def first_step():
    """BASIC's first step by hand: tensors by site, a list of microbatches each."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    data = torch.Generator().manual_seed(5)
    seen = {"0:input": [], "4:input": [], "4:grad_output": [], "4:weight": [model[4].weight.detach().clone()]}
    for _ in range(2):
        x = torch.randn(24, 32, generator=data)
        h = model[:4](x)
        y = model[4](h)
        y.retain_grad()
        (F.mse_loss(y, x[:, :16] * 2) / 2).backward()
        for name, tensor in (("0:input", x), ("4:input", h.detach()), ("4:grad_output", y.grad)):
            seen[name].append(tensor)
    return seen


def test_the_files_hold_what_was_quantized_and_what_it_became(tmp_path):
    facts = follow(tmp_path, table(["0:input", "4"]), judge="current")
    dumped, want = read(tmp_path, 1), first_step()
    names = {f"{site}@{n}" if n else site for site, tensors in want.items() for n in range(len(tensors))}
    assert {name.rpartition(".")[0] for name in dumped} == names
    for site, tensors in want.items():
        for micro, x in enumerate(tensors):
            name = f"{site}@{micro}" if micro else site
            fmt = ng.formats.E5M2 if site.endswith("grad_output") else ng.formats.E4M3FN
            q = ng.quantize(x, fmt)
            assert torch.equal(dumped[f"{name}.x"], x), name
            assert torch.equal(dumped[f"{name}.codes"].view(torch.uint8), q.codes.view(torch.uint8)), name
            assert torch.equal(dumped[f"{name}.scale"], q.scale), name
    size_on_disk = (tmp_path / "out" / "dumps" / "step00000001-rank0.safetensors").stat().st_size
    cost = facts["watch"]["dumps"]
    assert (cost["files"], cost["bytes"]) == (1, size_on_disk)
    assert cost["seconds"] > 0
    assert facts["unmet"] == []


def test_converted_layers_are_dumped_as_they_are_multiplied(tmp_path):
    follow(tmp_path, table(["2:weight"], [(1, 3)]), recipe="blockwise")
    assert files(tmp_path) == [f"step{step:08d}-rank0.safetensors" for step in (1, 2, 3)]
    dumped = [read(tmp_path, step) for step in (1, 2, 3)]
    assert [sorted(tensors) for tensors in dumped] == [["2:weight.codes", "2:weight.scale", "2:weight.x"]] * 3
    for tensors in dumped:
        q = ng.quantize(tensors["2:weight.x"], ng.formats.E4M3FN, granularity=ng.recipes.BLOCKWISE.fprop.b.granularity,
                        scaling=ng.recipes.BLOCKWISE.fprop.b.scaling)  # fmt: skip
        assert torch.equal(tensors["2:weight.codes"].view(torch.uint8), q.codes.view(torch.uint8))
        assert torch.equal(tensors["2:weight.scale"], q.scale)
    assert not torch.equal(dumped[0]["2:weight.x"], dumped[1]["2:weight.x"])  # copies: training went on


def test_dumps_change_nothing_and_record_no_further_step(tmp_path):
    follow(tmp_path, table(), judge="current")
    assert len(open_run(tmp_path / "out").tensors()["step"]) == 0  # every = 100


def test_the_cap_closes_a_table_and_is_told(tmp_path):
    small = table(["4"], [(1, 3)], ["weight"], cap=2 * (16 * 64 * 5 + 4) + 100)
    facts = follow(tmp_path, small, table(["0"], [(3, 3)], ["weight"]), judge="current")
    assert [sorted(read(tmp_path, step)) for step in (1, 2, 3)] == [
        *[["4:weight.codes", "4:weight.scale", "4:weight.x"]] * 2,
        ["0:weight.codes", "0:weight.scale", "0:weight.x"],
    ]
    said = (
        "dump[0]: its cap of 10.11 KiB was reached at step 3: 4:weight has 5.004 KiB more. Nothing was written for it "
        "from there on; give it a larger cap, or fewer sites or steps."
    )
    assert facts["unmet"] == [said]
    events = open_run(tmp_path / "out").events()
    assert (events["kind"].tolist(), events["message"].tolist()) == (["dump_capped"], [said])


def test_what_is_never_found_is_told(tmp_path):
    facts = follow(tmp_path, table(["fc9"]), table(["0"], [(50, None)]), judge="current")
    assert facts["unmet"] == [
        "dump[0].sites: 'fc9' matched nothing in this program; there are: '0', '2', '4'.",
        "dump[1].steps: none of them was reached; the program made 3 steps.",
    ]
    assert not (tmp_path / "out" / "dumps").exists()


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dumps").write_text("in the way")
    facts = follow(tmp_path, table(steps=[(1, 3)]), judge="current")
    assert facts["steps"] == 3
    assert facts["unmet"][0].startswith("dump: step 1 could not be written, and nothing after it was: FileExistsError")
    assert [path.name for path in (tmp_path / "out").glob(".step*")] == []


def test_a_failed_write_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("narrowgauge.session.dumps.file.save_file", full)
    facts = follow(tmp_path, table(steps=[(1, 3)]), judge="current")
    assert "No space left on device" in facts["unmet"][0]
    assert files(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="it has no umask")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_who_may_read_the_run_may_read_its_dumps(tmp_path, umask, mode):
    kept = os.umask(umask)
    try:
        follow(tmp_path, table(), judge="current")
    finally:
        os.umask(kept)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert "step00000001-rank0.safetensors" in found
    assert set(found.values()) == {mode}, found


def test_the_last_step_of_a_process_that_takes_no_new_thread_is_written(tmp_path, monkeypatch):
    def refused(thread):
        if thread.name == "narrowgauge-dump":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refused)
    facts = follow(tmp_path, table(steps=[(1, 3)]), judge="current")
    assert facts["watch"]["dumps"]["files"] == len(files(tmp_path)) == 3


def test_a_dump_says_what_it_is_and_inspect_tells(tmp_path):
    follow(tmp_path, table(["4"], roles=["input", "grad_output"]), judge="current")
    path = tmp_path / "out" / "dumps" / "step00000001-rank0.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata.pop("sites")) == {
        "4:input": {"format": "E4M3FN", "one_scale_per": "tensor", "microbatches": 2},
        "4:grad_output": {"format": "E5M2", "one_scale_per": "tensor", "microbatches": 2},
    }
    assert metadata == {
        "narrowgauge": "dump", "step": "1", "rank": "0", "command": "train.py", "converted_to": "",
        "plain_layers_by": "current",
    }  # fmt: skip
    seen = inspect(open_checkpoint(path), recipes=[ng.recipes.CURRENT], role="input")
    kinds = {row.entry.name: row.kind for row in seen.rows}
    assert {kinds[f"4:input.{part}"] for part in ("x", "codes", "scale")} == {"matrix", "codes", "scale"}
    codes = next(row for row in seen.rows if row.entry.name == "4:grad_output@1.codes")
    assert (codes.codes["scale"], codes.note) == ("4:grad_output@1.scale", "")
    said = (
        "A dump of narrowgauge: step 1 of rank 0, plain layers by current. Of each of 2 sites it has the tensor (.x), "
        "its codes (.codes) and their scale (.scale): 1 in E4M3FN, one scale per tensor; 1 in E5M2, one scale per "
        "tensor. The recipes see each .x as the operand that its name says, unless `--role` says another."
    )
    assert seen.checkpoint.notes[0] == said
    assert "A dump of narrowgauge" in plain(seen)


def test_inspect_looks_at_a_dump_as_it_was_quantized(tmp_path):
    follow(tmp_path, table(["4"]), judge="current")
    dumped = read(tmp_path, 1)
    seen = inspect(open_checkpoint(tmp_path / "out" / "dumps" / "step00000001-rank0.safetensors"))
    rows = {row.entry.name.removesuffix(".x"): row for row in seen.of("matrix")}
    assert {name: row.role for name, row in rows.items()} == {
        "4:input": "input", "4:input@1": "input", "4:weight": "weight",
        "4:grad_output": "grad_output", "4:grad_output@1": "grad_output",
    }  # fmt: skip
    for name, row in rows.items():
        x = dumped[f"{name}.x"].double()
        error = x - dumped[f"{name}.codes"].double() * dumped[f"{name}.scale"].double()
        sqnr = 10 * torch.log10(x.square().sum() / error.square().sum())
        assert row.became["current"]["sqnr_db"] == pytest.approx(sqnr.item(), abs=1e-4), name


@pytest.mark.parametrize(
    ("nbytes", "words"), [(0, "0 bytes"), (1023, "1023 bytes"), (1 << 31, "2 GiB"), (5 << 50, "5120 TiB")]
)
def test_sizes(nbytes, words):
    assert size(nbytes) == words
