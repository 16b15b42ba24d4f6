"""What a program may do to the process that it shares with the watch: it runs as without us, and its end is told."""

import functools
import importlib
import json
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from tests.session.inline import followed
from tests.session.test_watch import NARROWGAUGE, PLAIN, run
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import UsageError, let_pass
from narrowgauge.observe.store import open_run
from narrowgauge.observe.store.unlisted import UnlistedThread
from narrowgauge.session.attach import Session
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.models.family import Family
from narrowgauge.session.process import armed
from narrowgauge.session.process.live import Live

watching_module = importlib.import_module("narrowgauge.session.watching")  # of which the package has a function

TRAINS = """
import ctypes, os, resource, sys, torch
from torch import nn
torch.manual_seed(3)
model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{loss.item():.9f}", flush=True)
train(20)
"""

NO_FILES_GROW = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
NO_DESCRIPTORS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
"""
GIVEN_BACK = "for number in taken:\n    os.close(number)\n"

FULL = "a file reached the size that this process may write"
EMPTY = "no file descriptor is left to this process"
SILENT = "its process ended (exit code 7) and could not write so"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (NO_FILES_GROW, "sys.exit(7)", FULL),
        (NO_FILES_GROW.replace("1000", "100"), "sys.exit(7)", SILENT),
        (NO_DESCRIPTORS, "sys.exit(7)", SILENT),  # DuckDB, without one, ends the process
        (NO_DESCRIPTORS, "import time\ntime.sleep(11)\n" + GIVEN_BACK + "sys.exit(7)", EMPTY),
        ("", "ctypes.CDLL(None)._exit(7)", SILENT),
        ("", "os.execv('/bin/sh', ['sh', '-c', 'exit 7'])", SILENT),
    ],
    ids=[
        "no file grows",
        "no file is written",
        "no descriptor",
        "no descriptor for a while",
        "C's exit",
        "another program",
    ],
)
def test_it_ends_as_without_us_and_its_run_says_why_it_stopped(warm_python, tmp_path, before, after, why):
    pytest.importorskip("resource")
    script = TRAINS + before + "train(5)\n" + after
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "train.py").write_text(script.replace("time.sleep(11)", ""))
    alone = warm_python.run(["python", "train.py"], cwd=tmp_path / "alone")
    done = run(tmp_path, "train.py", script=script, options=["--every", "5"], warm=warm_python)
    assert (alone.returncode, done.returncode, done.stdout) == (7, 7, alone.stdout)
    found = open_run(tmp_path / "out")
    assert (found.status, found.ends.words) == ("stopped", f"stopped: {why}")
    assert f"narrowgauge: stopped: {why}; what was written is kept.\n" in done.stderr  # which may be a file as well
    assert json.loads((tmp_path / "out" / "run.json").read_text())["ended"]


def test_a_folder_without_room_for_a_run_is_refused_before_anything_runs(tmp_path):
    pytest.importorskip("resource")
    (tmp_path / "train.py").write_text("print('ran')")
    command = ["sh", "-c", 'ulimit -f 4; exec "$@"', "sh", *NARROWGAUGE, "run", "--out", "out", "--", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=60)
    told = "narrowgauge: cannot write to out: File too large; give another folder with --out.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_signal_ended_is_killed(warm_python, tmp_path):
    done = run(tmp_path, "train.py", script=TRAINS + "os.kill(os.getpid(), 9)", warm=warm_python)
    assert done.returncode == 128 + 9
    assert open_run(tmp_path / "out").status == "killed"


class TookTooLong(Exception):
    """Of the program, whose time limit ends whatever runs just then."""


def stop(*_):
    raise TookTooLong


def stop_once(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise TookTooLong


def stop_unnamed(number, frame):
    del number, frame
    raise TookTooLong


def stop_by_name(number, frame):
    number = signal.Signals(number).name
    raise TookTooLong(number)


def stop_once_by_keyword(*given, error=None):
    signal.signal(given[0], signal.SIG_DFL)
    raise error or TookTooLong


class Unnamed:
    def __call__(self, number, frame):
        del number, frame
        raise TookTooLong


class Limit:
    def __call__(self, *_):
        stop()

    def method(self, *_):
        stop()


class Interrupted(nn.Linear):
    """A layer at whose weight only we look, of all that does outside of its call."""

    armed = False

    def named_parameters(self, *rest, **further):
        self.interrupt()
        return super().named_parameters(*rest, **further)

    def parameters(self, recurse=True):
        self.interrupt()
        return super().parameters(recurse)

    def interrupt(self):
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
@pytest.mark.parametrize(
    "handler",
    [
        *(stop, stop_once, stop_unnamed, stop_by_name, stop_once_by_keyword, Limit(), Limit().method, Unnamed()),
        *(functools.partial(stop, 1), functools.partial(stop_unnamed)),
    ],
)
def test_a_time_limit_that_ends_while_we_look_ends_what_the_program_does(tmp_path, handler):
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with followed(tmp_path, every=1) as (session, _):
            model = Interrupted(32, 32)
            optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
            model.armed = True
            with pytest.raises(TookTooLong):
                model(torch.randn(4, 32)).sum().backward()
            for _ in range(2):
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
            model.armed = True
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
        assert session.facts()["steps"] == 3
    finally:
        signal.signal(signal.SIGALRM, before)


@contextmanager
def at_alarm(handler):
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def watched_step(folder):
    """A watch that one step was made under, and the model."""
    watching, model = ng.watch(out=folder), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return watching, model


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
def test_a_time_limit_that_ends_while_the_watch_begins_is_the_program_s(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(armed, "_attached", [])
    monkeypatch.setattr(armed, "Watched", lambda *_: signal.raise_signal(signal.SIGALRM))
    with at_alarm(stop), pytest.raises(TookTooLong):
        armed._attach(tmp_path, Family(), CompiledCalls(), [])
    assert "this process is not watched: TookTooLong" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
def test_a_time_limit_that_ends_while_a_watch_is_closed_is_the_program_s_and_the_run_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "facts", lambda session: signal.raise_signal(signal.SIGALRM))
    with at_alarm(stop):
        watching, _ = watched_step(tmp_path / "run")
        with pytest.raises(TookTooLong):
            watching.close()
    found = open_run(tmp_path / "run")
    assert (found.status, found.meta["notes"]) == ("complete", ["closing the run failed: TookTooLong()"])
    assert Live.current is None


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
@pytest.mark.parametrize(("of", "name"), [(Session, "facts"), (UnlistedThread, "join")])
def test_a_handler_that_closes_the_watch_while_it_is_closed_may_end_the_program(tmp_path, monkeypatch, of, name):
    waits = getattr(of, name)

    def interrupted(waiting, *args):
        monkeypatch.setattr(of, name, waits)
        signal.raise_signal(signal.SIGALRM)
        return waits(waiting, *args)

    def handler(*_):
        watching.close()
        sys.exit(3)

    with at_alarm(handler):
        watching, model = watched_step(tmp_path / "run")
        monkeypatch.setattr(of, name, interrupted)
        with pytest.raises(SystemExit, match="3"):
            watching.close()
    assert Live.current is None
    assert open_run(tmp_path / "run").status == "complete"
    assert not model._forward_hooks


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
def test_a_handler_that_begins_a_watch_while_one_begins_is_told(tmp_path, monkeypatch):
    begin = watching_module._begin

    def interrupted(*args):
        monkeypatch.setattr(watching_module, "_begin", begin)
        signal.raise_signal(signal.SIGALRM)
        return begin(*args)

    monkeypatch.setattr(watching_module, "_begin", interrupted)
    with at_alarm(lambda *_: ng.watch(out=tmp_path / "b")), pytest.raises(UsageError, match="about to be watched"):
        ng.watch(out=tmp_path / "a")
    with ng.watch(out=tmp_path / "a"):
        assert Live.current is not None


class Box(nn.Module):
    """It refuses to be listed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def children(self):
        raise RuntimeError("use .layer")

    named_children = children


def test_a_container_that_refuses_to_be_listed_is_followed(tmp_path):
    box = Box()
    optimizer = torch.optim.SGD(box.parameters(), lr=0.1)
    with ng.watch(out=tmp_path / "run", every=1):
        for _ in range(3):
            box.layer(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    found = open_run(tmp_path / "run")
    assert found.meta["notes"] == []
    assert {str(site) for site in found.tensors()["site"]} >= {"layer:input", "layer:weight"}


def test_hooks_that_come_or_go_while_they_are_called_get_no_keywords(tmp_path):
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer)
    for module in (model, layer):
        module.register_forward_pre_hook(lambda module, args: module._forward_hooks_with_kwargs.clear())
        module.register_forward_pre_hook(lambda module, args: module._forward_pre_hooks_with_kwargs.clear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=1):
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    found = open_run(tmp_path / "run")
    assert found.status == "complete"
    assert found.meta["steps"] == 4
    assert not any("failed" in note for note in found.meta["notes"])


def test_what_is_said_of_a_hook_is_said_before_it_is_there(tmp_path):
    """A signal's handler may call the module in between."""
    layer = nn.Linear(4, 4)
    seen = []

    class Told(type(layer._forward_hooks_with_kwargs)):
        def __setitem__(self, number, wanted):
            seen.append(number in layer._forward_hooks)
            super().__setitem__(number, wanted)

    layer._forward_hooks_with_kwargs = Told()
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=1):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert seen
    assert not any(seen)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("code", [0, 4])
def test_a_log_that_takes_nothing_more_leaves_the_program_its_exit_code(warm_python, tmp_path, code):
    (tmp_path / "train.py").write_text(TRAINS + f"sys.exit({code})")
    command = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh", *NARROWGAUGE, "run", "--out", "out", "--", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=100)
    assert done.returncode == code
    assert open_run(tmp_path / "out").status == "complete"


def test_a_handlers_decorator_is_nobody_elses_error():
    @torch.no_grad()
    def ours():
        raise ValueError("ours")

    @torch.no_grad()
    def handler(*_):
        raise TimeoutError("theirs")

    def told(*of):  # who called it, say, as a logger might be
        raise LookupError(*of)

    def counts(number, before):  # when it has ended, nobody called it
        yield number
        raise LookupError(before)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        for raising, passes in (
            (ours, False),
            (lambda: told(sys._getframe()), False),
            (lambda: told(15, "epochs"), False),
            (lambda: told(1000, sys._getframe()), False),
            (lambda: told([], sys._getframe()), False),
            (lambda: list(counts(15, None)), False),
            (lambda: signal.Signals(1000), False),
            (lambda: signal.raise_signal(signal.SIGTERM), True),
        ):
            try:
                raising()
            except Exception as error:
                found = error
            with pytest.raises(TimeoutError) if passes else nullcontext():
                let_pass(found)
    finally:
        signal.signal(signal.SIGTERM, before)
