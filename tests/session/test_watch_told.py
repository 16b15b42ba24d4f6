"""What `ng.watch` says when it ends: what the command says, where nobody else would."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import UsageError

WARNED = ("narrowgauge.session", logging.WARNING)
PLAIN_CALL = """
import torch, narrowgauge as ng
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ng.watch(model, out="out")
for _ in range(3):
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
"""
FEW = "No tensor was recorded: the program made 3 steps, and tensors are recorded every 10 steps. Write `every=1` to"


@pytest.fixture
def said(caplog):
    """What was said since, each sentence without its beginning."""

    def sentences():
        return [
            record.getMessage().removeprefix("narrowgauge: ")
            for record in caplog.records
            if (record.name, record.levelno) == WARNED
        ]

    return sentences


def train(parameters, call, steps=4):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        call(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()


def test_what_settings_asked_in_vain_is_told_with_their_file(tmp_path, said):
    config = tmp_path / "narrowgauge.toml"
    config.write_text(
        "[watch]\nevery = 2\nsites = ['fc9', '0']\n[[dump]]\nsites = ['0']\nsteps = 1\ncap = '1 KiB'\n"
        "[[high]]\nsites = ['*']\ngemms = ['wgrad']\n"
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    with ng.watch(model, out=tmp_path / "a", config=config) as watching:
        train(model.parameters(), model)
        assert said() == []
    beginnings = ["high matched nothing", "watch.sites: 'fc9' matched nothing", "dump[0]: its cap of 1 KiB was reached"]
    assert len(said()) == 3
    assert all(any(told.startswith(f"{config}: {words}") for told in said()) for words in beginnings)
    watching.close()
    assert len(said()) == 3  # once


def test_what_was_not_found_is_told(tmp_path, said):
    weight = torch.randn(16, 16, requires_grad=True)
    with ng.watch(out=tmp_path / "a", every=1):
        train([weight], lambda x: x @ weight)
    assert [told.partition(":")[0] for told in said()] == ["No model was found"]


def test_where_all_calls_of_the_model_were_compiled_before_that_is_why_it_was_not_found(tmp_path, said):
    model = nn.Linear(16, 16)
    compiled = torch.compile(lambda x: model(x), backend="eager")
    compiled(torch.randn(4, 16))
    with ng.watch(model, out=tmp_path / "a", every=2):
        train(model.parameters(), compiled)
    assert said()[:1] == [
        "No model was found: what calls it was compiled before the watch began. Call torch.compile after ng.watch."
    ]


def test_of_a_plain_call_it_is_told_when_the_process_ends(tmp_path):
    done = subprocess.run([sys.executable, "-c", PLAIN_CALL], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"narrowgauge: {FEW}")
    assert done.stderr.count("\n") == 1


def test_nothing_is_said_where_all_was_found_nor_of_a_watch_that_did_not_begin(tmp_path, said, monkeypatch):
    model = nn.Linear(16, 16)
    with ng.watch(model, out=tmp_path / "a", every=1):
        train(model.parameters(), model)
    with monkeypatch.context() as patch:
        patch.setattr("narrowgauge.session.watching._catch_up", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ng.watch(model, out=tmp_path / "b")
    (tmp_path / "c").write_text("")
    with pytest.raises(UsageError):
        ng.watch(model, out=tmp_path / "c")
    assert said() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_tells_what_no_other_can_have_found(tmp_path, said, monkeypatch, rank):
    config = tmp_path / "narrowgauge.toml"
    config.write_text("[watch]\nevery = 1\nsites = ['fc9']\n[[dump]]\nsites = ['(model)']\nsteps = 9\n")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(16, 16)
    with ng.watch(model, out=tmp_path / "a", config=config):
        train(model.parameters(), model)
    told = f"{os.fspath(config)}: dump[0].steps: none of them was reached; the program made 4 steps."
    assert said() == ([told] if rank == 0 else [])


def test_a_tracker_that_failed_is_told(tmp_path, said):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    (tmp_path / "m.prom").mkdir()
    config = tmp_path / "narrowgauge.toml"
    config.write_text(f"[watch]\nevery = 1\n[export]\nprometheus = {{ file = '{tmp_path / 'm.prom'}' }}\n")
    model = nn.Linear(16, 16)
    with ng.watch(model, out=tmp_path / "a", config=config):
        train(model.parameters(), model)
    (told,) = said()
    assert "cannot write" in told
