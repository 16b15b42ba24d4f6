"""`narrowgauge bench`: one line where there is no GPU, one message where it is used wrongly, clean JSON."""

import json

import pytest
import torch

from narrowgauge.cli.main import main


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("words", [["quantize"], ["gemm"], ["gemm", "--sweep"], ["step"], ["overhead", "--size", "1b"]])
def test_without_a_gpu_one_line_says_what_was_not_measured(no_gpu, capsys, words):
    main(["bench", *words])  # no SystemExit: the code is 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU here, so this was not measured: ")
    assert "--device cpu" in line


def test_and_as_json(no_gpu, capsys, tmp_path):
    main(["bench", "step", "--json", "--out", str(tmp_path / "x.json")])
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is False
    assert "no GPU here" in found["reason"]
    assert not (tmp_path / "x.json").exists()


def test_json_is_all_that_is_printed_and_written(capsys, tmp_path):
    out = tmp_path / "new" / "gemm.json"
    main(["bench", "gemm", "--device", "cpu", "--shape", "16x16x32", "--rounds", "1", "--json", "--out", str(out)])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert (found["rows"][0]["M"], found["rows"][0]["K"], found["rows"][0]["N"]) == (16, 16, 32)


def test_what_was_measured_before_the_end_came_is_in_the_file(capsys, tmp_path, monkeypatch):
    def end(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowgauge.bench.step.joules_per_call", end)
    out = tmp_path / "step.json"
    words = ["--size", "tiny", "--device", "cpu", "--recipes", "current", "--eager", "--rounds", "1"]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["bench", "step", *words, "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row["variant"] for row in found["rows"]] == ["bf16", "current"]
    assert all(row["ms"] > 0 for row in found["rows"])
    assert "unfinished: more was still to be measured when this was written." in found["notes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quantize", "--shape", "3x"], "--shape is '3x'; expected MxK, such as 4096x4096."),
        (["gemm", "--shape", "1x2"], "--shape is '1x2'; expected MxKxN, such as 4096x4096x4096."),
        (
            ["gemm", "--device", "cpu", "--shape", "99999999x99999999x9"],
            "the device has too little memory for this (can't allocate memory: you tried to allocate",
        ),
        (["gemm", "--sweep", "--shape", "1x2x3"], "--sweep has a grid of its own; leave --shape out."),
        (["gemm", "--sweep", "--peer", "torchao"], "--sweep draws the map of our own layers; leave --peer out."),
        (["quantize", "--device", "cpu", "--peer", "torchoa"], "no peer is called 'torchoa'; did you mean 'torchao'?"),
        (["gemm", "--device", "cpu", "--peer", "torchoa"], "no peer is called 'torchoa'; did you mean 'torchao'?"),
        (["overhead", "--device", "cpu", "--peer", "torchoa"], "no peer is called 'torchoa'; did you mean 'torchao'?"),
        (["step", "--device", "cpu", "--peer", "torchoa"], "no peer is called 'torchoa'; did you mean 'torchao'?"),
        (["step", "--device", "cpu", "--recipes", "curent"], "did you mean 'current'?"),
        (["step", "--device", "cpu", "--precisions", "fp61"], "no precision is called 'fp61'; did you mean 'fp16'?"),
        (["step", "--size", "7b"], "'7b' is not one of"),
        (["overhead", "--device", "cpu", "--recipes", "curent"], "did you mean 'current'?"),
        (["quantize", "--out", "/proc/none/x.json"], "--out: cannot write to /proc/none/x.json"),
        (["speed"], "No such command 'speed'"),
    ],
)
def test_wrong_use_is_told_why_and_ends_with_2(capsys, words, says):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words])
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert says in said.out + said.err
