"""Scalars on their way to the run: what lies on the host is not taken anywhere."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.session.tensors.deferred import Deferred, _copied, _Row


class Launched(TorchDispatchMode):
    """What is launched."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_scalars_on_the_host_are_read_where_they_are():
    """A copy of them to a device would wait for it."""
    rows, rate, launched = [], torch.tensor(0.125), Launched()
    scalars = {"loss": torch.tensor([2.5]), "lr": rate, "data_digest": torch.tensor(2**52 - 1), "tokens": 48}
    with launched:
        deferred = Deferred()
        deferred.put(scalars, rows.append)
        rate.fill_(7.0)  # as a schedule does it
        deferred.put({}, rows.append)
    assert rows == [{"loss": 2.5, "lr": 0.125, "data_digest": 2.0**52 - 1, "tokens": 48.0}, {}]
    assert launched.names == {"_local_scalar_dense", "fill_"}


def test_what_comes_later_waits_for_what_was_put_before():
    class Event:
        passed = False

        def query(self):
            return self.passed

        def synchronize(self):
            self.passed = True

    rows, deferred, event = [], Deferred(), Event()
    values = torch.tensor([0.5], dtype=torch.float64)
    deferred._waiting.append(_Row({"tokens": 1.0}, {"loss": 0}, values, event, rows.append))
    deferred.put({"tokens": 2.0}, rows.append)
    assert rows == []
    deferred.drain(wait=True)
    assert rows == [{"tokens": 1.0, "loss": 0.5}, {"tokens": 2.0}]


def test_what_lies_on_a_device_is_copied_by_kinds_and_found_again():
    ints = [torch.tensor(2**52 - number) for number in range(3)]
    floats = [torch.tensor([0.5 + number]) for number in range(3)]
    halves = [torch.tensor(number / 2, dtype=torch.bfloat16) for number in range(3)]
    scalars = [x for row in zip(floats, ints, halves, strict=True) for x in row]
    values, event, places = _copied(scalars)
    assert event is None
    assert [values[place].item() for place in places] == [x.item() for x in scalars]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_rows_of_several_steps_come_from_the_device_in_order():
    rows, launched, deferred = [], Launched(), Deferred()
    steps = [{"loss": torch.tensor(0.5 + n).cuda(), "digest": torch.tensor(n).cuda(), "tokens": 7} for n in range(5)]
    with launched:
        deferred.put_all([(steps[0], rows.append), *((step, rows.append) for step in steps[1:]), ({}, rows.append)])
        deferred.put({"tokens": 1}, rows.append)
        deferred.drain(wait=True)
    assert rows[:5] == [{"loss": 0.5 + n, "digest": float(n), "tokens": 7.0} for n in range(5)]
    assert rows[5:] == [{}, {"tokens": 1.0}]
    assert "_local_scalar_dense" not in launched.names  # which would wait for the device
