"""The most memory a program held, asked for in a short way where that says the same."""

import sys

import numpy as np
import pytest
import torch

from narrowgauge.session.steps import memory
from narrowgauge.session.steps.memory import NEAR, PeakMemory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def kernels_mark():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) * 1024


def test_the_short_way_says_what_the_kernel_says():
    peak = PeakMemory()
    for _ in range(3):
        held = np.ones(4 << 20)  # 32 MiB
        peak.sample()
        assert peak.bytes() == pytest.approx(kernels_mark(), abs=2 * NEAR)
    del held


def test_where_it_says_more_it_is_not_taken(monkeypatch):
    """What ran in the process before it became this program may have been larger."""
    monkeypatch.setattr(memory, "_used", lambda: 1 << 50)
    peak = PeakMemory()
    for _ in range(2):
        peak.sample()
    assert peak.bytes() == pytest.approx(kernels_mark(), abs=NEAR)


def test_the_peak_is_never_less_than_what_is_held_now(monkeypatch):
    """The kernel's mark lags behind its count of pages by what it has not added up yet."""
    peak = PeakMemory()
    monkeypatch.setattr(peak, "_highest", lambda: peak.now() - NEAR // 2)
    now = peak.now()
    peak.sample(now)
    assert peak.bytes() >= now


def test_what_a_probe_held_is_left_out():
    peak = PeakMemory()
    peak.sample()
    before = peak.bytes()
    held = []
    while kernels_mark() < before + (128 << 20):  # what was held earlier may have been more than is held now
        held.append(np.ones(4 << 20))
    del held
    peak.forget()
    if kernels_mark() > before + (64 << 20):
        pytest.skip("this kernel does not reset its mark")
    peak.sample()
    assert peak.bytes() < before + (64 << 20)


@pytest.mark.parametrize("found", [{}, {"allocated_bytes": {"all": {"current": 3, "peak": 5}}}], ids=["none", "some"])
def test_of_a_gpu_it_is_what_torch_has_allocated(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: found)
    peak = PeakMemory()
    assert peak.now() == (3 if found else 0)
    assert peak.bytes() == (5 if found else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_it_is_what_torch_says_of_it():
    held = torch.zeros(1 << 20, device="cuda")
    peak = PeakMemory()
    peak.sample()
    assert peak.now() == torch.cuda.memory_allocated() >= held.nbytes
    assert peak.bytes() == torch.cuda.max_memory_allocated()
