"""Energy is a counter's difference, or a reason why there is none."""

import sys
import types

import torch

from narrowgauge.bench.energy import EnergyMeter, EnergyPerTurn


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


def test_turns_add_up_to_joules_per_call(monkeypatch):
    energy = EnergyPerTurn(on_a_gpu(monkeypatch, fake_nvml([0, 1000, 3000, 5000, 11000])))
    for _ in range(2):
        energy.begins("a")
        energy.ends("a")
    assert energy.per_call("a", calls_per_turn=2) == (2.0 + 6.0) / 4
    assert energy.per_call("never", 2) is None
