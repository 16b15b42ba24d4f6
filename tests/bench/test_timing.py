"""Turns are fair: every variant in every round, leads not counted, spread reported."""

import time

import pytest
import torch

from narrowgauge.bench import timing

CPU = torch.device("cpu")


def test_summary_is_median_and_tenths():
    found = timing.summarize([float(i) for i in range(1, 12)])
    assert (found.median, found.p10, found.p90, found.samples) == (6.0, 2.0, 10.0, 11)


def test_one_sample_is_its_own_spread():
    assert timing.summarize([3.0]) == timing.Timing(3.0, 3.0, 3.0, 1)


def test_variants_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    found = timing.interleave(calls, CPU, rounds=2, samples=2, lead=1)
    assert "".join(order) == "ab" + "aaabbb" * 2
    assert {name: value.samples for name, value in found.items()} == {"a": 4, "b": 4}


def test_a_block_is_one_sample_of_several_calls(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    found = timing.interleave({"a": lambda: None}, CPU, rounds=1, samples=1, block=10)
    assert found["a"].median == pytest.approx(100.0)  # one second of ten calls


def test_cold_runs_on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1024)
    assert timing.interleave({"a": lambda: None}, CPU, rounds=3, cold=True)["a"].samples == 3


def test_the_host_s_time_is_that_of_the_first_calls():
    found = timing.interleave({"slow": lambda: time.sleep(0.01)}, CPU, rounds=3, lead=2)["slow"]
    assert 9 < found.host < 200
    assert timing.interleave({"none": lambda: None}, CPU, rounds=2)["none"].host is None
