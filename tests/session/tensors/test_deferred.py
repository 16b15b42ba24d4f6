"""Scalars on their way to the run: what lies on the host is not taken anywhere."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.session.tensors.deferred import Deferred


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
    deferred._waiting.append((["loss"], {"tokens": 1.0}, torch.tensor([0.5], dtype=torch.float64), event, rows.append))
    deferred.put({"tokens": 2.0}, rows.append)
    assert rows == []
    deferred.drain(wait=True)
    assert rows == [{"tokens": 1.0, "loss": 0.5}, {"tokens": 2.0}]
