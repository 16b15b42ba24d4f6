"""Scalars on their way to the run: what lies on the host is not taken anywhere."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.session.tensors import deferred
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
        queue = Deferred()
        queue.put(scalars, rows.append)
        rate.fill_(7.0)  # as a schedule does it
        queue.put({}, rows.append)
        queue.drain()
    assert rows == [{"loss": 2.5, "lr": 0.125, "data_digest": 2.0**52 - 1, "tokens": 48.0}, {}]
    assert launched.names == {"detach", "_local_scalar_dense", "fill_"}


def test_what_comes_later_waits_for_what_was_put_before():
    class Event:
        passed = False

        def query(self):
            return self.passed

        def synchronize(self):
            self.passed = True

    rows, queue, event = [], Deferred(), Event()
    first = deferred.Row({"tokens": 1.0}, ["loss"], None, rows.append)
    queue._waiting.append(([first], torch.tensor([0.5], dtype=torch.float64), event))
    queue.put({"tokens": 2.0}, rows.append)
    queue.drain()
    assert rows == []
    queue.drain(wait=True)
    assert rows == [{"tokens": 1.0, "loss": 0.5}, {"tokens": 2.0}]


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


def test_lines_of_short_steps_are_handed_over_together_and_of_long_ones_at_once(monkeypatch):
    clock, rows = Clock(), []
    monkeypatch.setattr(deferred, "time", clock)
    queue = Deferred()
    seen = []
    for _ in range(40):
        clock.now += 0.001
        queue.put({"loss": clock.now}, rows.append)
        seen.append(len(rows))
    assert seen == [16 * (steps // 16) for steps in range(1, 41)]
    clock.now += 0.3
    queue.put({"loss": clock.now}, rows.append)
    assert len(rows) == 41
    clock.now += 0.3
    queue.put({"loss": clock.now}, rows.append)
    assert [row["loss"] for row in rows] == sorted(row["loss"] for row in rows)
    assert len(rows) == 42


def test_values_of_several_steps_come_back_to_their_names(monkeypatch):
    """Tensors that lie elsewhere are stacked as they are now, step by step, and copied together."""
    rows, queue, rate = [], Deferred(), torch.tensor(0.5, dtype=torch.bfloat16)
    for step in range(3):
        on_device = {"loss": torch.tensor([float(step)]), "rate": rate} if step != 1 else {}
        values = deferred._stacked(on_device)
        queue._rows.append(deferred.Row({"tokens": float(step)}, list(on_device), values, rows.append))
        rate.fill_(7.0)
    queue.drain()
    assert rows == [
        {"tokens": 0.0, "loss": 0.0, "rate": 0.5}, {"tokens": 1.0}, {"tokens": 2.0, "loss": 2.0, "rate": 7.0}
    ]  # fmt: skip
