"""Scalars on their way to the run: what lies on the host is not taken anywhere."""

import pytest
import torch
from tests.session.tensors.far_away import Device
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.session.tensors.deferred import Deferred, Row


class Launched(TorchDispatchMode):
    """What is launched."""

    def __init__(self):
        super().__init__()
        self.names, self.times = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        self.times += 1
        return function(*args, **(kwargs or {}))


def test_scalars_on_the_host_are_read_where_they_are():
    """A copy of them to a device would wait for it."""
    rows, rate, launched = [], torch.tensor(0.125), Launched()
    scalars = {"loss": torch.tensor([2.5]), "lr": rate, "data_digest": torch.tensor(2**52 - 1), "tokens": 48}
    with launched:
        deferred = Deferred()
        deferred.put(Row(scalars, rows.append))
        rate.fill_(7.0)  # as a schedule does it
        deferred.put(Row({}, rows.append))
    assert rows == [{"loss": 2.5, "lr": 0.125, "data_digest": 2.0**52 - 1, "tokens": 48.0}, {}]
    assert launched.names == {"_local_scalar_dense", "fill_"}


def test_what_comes_later_waits_for_what_was_put_before(monkeypatch):
    Device(monkeypatch)
    rows, deferred = [], Deferred()
    deferred.put(Row({"tokens": 1.0, "loss": torch.tensor(0.5)}, rows.append))
    deferred.put(Row({"tokens": 2.0}, rows.append))
    assert rows == []
    assert not deferred.empty
    deferred.drain(wait=True)
    assert rows == [{"tokens": 1.0, "loss": 0.5}, {"tokens": 2.0}]
    assert deferred.empty


def test_what_is_put_together_is_copied_together_and_of_one_that_fails_the_others_arrive(monkeypatch):
    device = Device(monkeypatch)
    rows, deferred = [], Deferred()
    scale, big = torch.tensor([4096.0], dtype=torch.float16), torch.tensor(2**24 + 1, dtype=torch.int32)
    deferred.put_all(
        [
            Row({"loss": torch.tensor(0.1), "scale": scale, "lr": torch.tensor(0.1, dtype=torch.float64)}, rows.append),
            Row({"loss": torch.tensor(0.2), "big": big}, rows.append),
            Row({"loss": 0.75}, rows.append),
        ]
    )
    assert device.copied == [2, 2]  # in float32, and what float32 does not hold in float64
    one, other = torch.tensor([0.1, 0.2]).tolist()
    with pytest.raises(RuntimeError, match="invalid for input of size 2"):
        deferred.put_all([Row({"loss": torch.tensor(0.5)}, rows.append), Row({"loss": torch.ones(2)}, rows.append)])
    assert rows == []
    device.passed = True
    deferred.drain()
    assert rows == [
        {"loss": one, "scale": 4096.0, "lr": 0.1},
        {"loss": other, "big": 2.0**24 + 1},
        {"loss": 0.75},
        {"loss": 0.5},
    ]


def test_the_first_of_too_many_are_waited_for_and_no_more_than_these(monkeypatch):
    Device(monkeypatch)
    rows, deferred = [], Deferred(longest=3)
    for number in range(5):
        deferred.put(Row({"loss": torch.tensor(float(number))}, rows.append))
    assert rows == [{"loss": 0.0}, {"loss": 1.0}]


@pytest.mark.gpu
def test_from_a_gpu_sixteen_losses_take_a_few_operations_and_no_waiting():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    rows, deferred, launched = [], Deferred(), Launched()
    losses = [torch.tensor(float(number), device="cuda") for number in range(16)]
    Deferred().put_all(Row({"loss": loss}, [].append) for loss in losses)  # what is loaded as it is needed first waits
    with launched:
        torch.cuda._sleep(200_000_000)
        deferred.put_all(Row({"loss": loss}, rows.append) for loss in losses)
        assert rows == []
    assert launched.times <= 4, launched.names
    assert not launched.names & {"_local_scalar_dense", "_to_copy"}
    deferred.drain(wait=True)
    assert rows == [{"loss": float(number)} for number in range(16)]


@pytest.mark.gpu
def test_what_comes_from_a_gpu_that_is_not_the_current_one_is_awaited_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    rows, deferred, loss = [], Deferred(), torch.tensor(2.5, device="cuda:1")
    Deferred().put(Row({"loss": 2 * loss}, [].append))  # as above
    with torch.cuda.device(1):
        torch.cuda._sleep(1_000_000_000)
    deferred.put(Row({"loss": 2 * loss}, rows.append))
    torch.cuda.synchronize(0)
    deferred.drain()
    assert rows == []
    deferred.drain(wait=True)
    assert rows == [{"loss": 5.0}]
