"""Where the program plainly trains, and where it does not: `heard` has more to ask there."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from narrowgauge.session.doors import hearing as doors
from narrowgauge.session.doors.hearing import Hearing


@pytest.fixture
def hearing():
    """Of this thread."""
    found = Hearing()
    assert found.mine()
    return found


def found_in(asked):
    """What was found in each of these places."""
    found = []

    def ask(x):
        found.append(asked())
        return x * 2

    def in_backward(x):
        y = x.requires_grad_() * 2
        y.register_hook(ask)
        y.sum().backward()

    def in_fake_mode(x):
        with FakeTensorMode():
            ask(torch.ones(2))

    def in_a_thread(x):
        thread = threading.Thread(target=ask, args=(x,))
        thread.start()
        thread.join()

    transforms = torch.func.vmap(ask), torch.func.grad(lambda x: ask(x).sum()), make_fx(ask)
    for place in (
        *transforms,
        in_backward,
        in_fake_mode,
        in_a_thread,
        lambda x: torch.jit.trace(ask, x, check_trace=False),
    ):
        before = len(found)
        place(torch.ones(2))
        assert len(found) > before
    return found


@pytest.mark.filterwarnings("ignore")  # torch.jit is old
def test_no_place_where_tensors_are_unreal_or_a_backward_runs_is_plain(hearing):
    assert hearing.plainly()
    assert not any(found_in(hearing.plainly))
    assert hearing.plainly()


def test_nor_is_what_is_not_to_be_heard(hearing):
    hearing.deaf += 1
    assert not hearing.plainly()


@pytest.mark.parametrize(
    ("initialized", "captures", "plain"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_nor_is_a_capture_which_only_a_gpu_that_was_woken_has(hearing, monkeypatch, initialized, captures, plain):
    monkeypatch.setattr(doors, "_cuda", SimpleNamespace(_initialized=initialized))
    monkeypatch.setattr(doors, "_captures", lambda: captures)
    assert hearing.plainly() == plain
