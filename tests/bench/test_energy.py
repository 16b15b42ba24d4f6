"""Energy is a counter's difference, or a reason why there is none."""

import sys
import types

import torch

from narrowgauge.bench.energy import EnergyMeter, joules_per_call


def fake_nvml(readings):
    module = types.ModuleType("pynvml")
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    left = iter(readings)
    module.nvmlDeviceGetTotalEnergyConsumption = lambda handle: next(left)
    return module


def on_a_gpu(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    facts = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return EnergyMeter(torch.device("cuda", 0))


def test_a_cpu_has_none_and_says_so():
    meter = EnergyMeter(torch.device("cpu"))
    assert meter.reason == "no energy counter on 'cpu'"
    assert meter.joules() is None


def test_without_the_package_it_says_what_to_install(monkeypatch):
    meter = on_a_gpu(monkeypatch, None)
    assert meter.reason == "nvidia-ml-py is not installed (pip install 'narrowgauge[bench]')"


def test_an_error_of_nvml_is_the_reason(monkeypatch):
    meter = on_a_gpu(monkeypatch, fake_nvml([]))
    assert meter.reason.startswith("NVML cannot read it")
    assert meter.joules() is None


def test_joules_are_those_of_one_of_many_calls(monkeypatch):
    meter = on_a_gpu(monkeypatch, fake_nvml([0, 1000, 9000]))
    calls = []
    found = joules_per_call(meter, lambda: calls.append(1), torch.device("cpu"), ms=500.0)
    assert found == 2.0  # 8 joules, 4 calls of half a second
    assert len(calls) == 5  # one of them before the counter was read


def test_without_a_counter_nothing_is_run():
    meter = EnergyMeter(torch.device("cpu"))
    assert joules_per_call(meter, lambda: 1 / 0, torch.device("cpu"), ms=1.0) is None
