"""The compiled walk is made beside the program: a step waits for no compiler, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.observe.stats.test_collector import Notebook

from narrowgauge.compute.quant import quantize
from narrowgauge.compute.recipes import CURRENT
from narrowgauge.metrics import OPERAND_COLUMNS
from narrowgauge.observe.stats import Collector, host, host_compile, host_ready
from narrowgauge.observe.stats.host_compile import NotCachedError, alone

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """A walk that nobody has compiled; its compiler ends when it is told to, and has compiled if `done` says so."""
    walk, state = host_ready.Walk(), SimpleNamespace(done=False)
    compiler = tmp_path / "compiler.py"
    compiler.write_text("import sys; sys.stdin.read()")

    def call_all(module):
        if not state.done:
            raise NotCachedError

    monkeypatch.setattr(host_ready, "WALK", walk)
    monkeypatch.setattr(host_ready, "call_all", call_all)
    monkeypatch.setattr(host_ready, "host_compile", SimpleNamespace(__file__=str(compiler)))
    state.walk, state.compiler = walk, compiler
    yield state
    walk.stop()


def test_steps_that_passes_counted_are_said_to_be_slow_unless_most_had_the_walk(cold):
    rule, x = CURRENT.uses("input")[0], torch.randn(64, 64)
    collector, told = Collector(Notebook()), []
    for step in range(4):
        cold.walk.loaded = step >= 2
        collector.begin_step(step)
        collector.judge("m", "input", x, rule)
        collector.judge("n", "input", x, rule)
        collector.end_step()
        told.append((collector.by_passes, collector.why_slow().partition(",")[0]))
    why = "most were counted by slower passes"
    assert told == [(1, why), (2, why), (2, why), (2, "")]


def in_a_thread(module):
    """Compile, but in the main thread, where it has to be there already."""
    if threading.current_thread() is threading.main_thread():
        raise NotCachedError


def test_steps_are_recorded_by_passes_until_the_walk_is_there(cold):
    book, rule = Notebook(), CURRENT.uses("input")[0]
    collector = Collector(book)
    x = torch.randn(600, 256)
    q = quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling)
    ways = []
    for step in range(3):
        collector._turn = 0  # the same rows
        collector.begin_step(step)
        judged = collector.judge("m", "input", x, rule)
        ways.append(judged)
        if not judged:
            collector.operand("m", "input", x, q)
        collector.end_step()
        if step == 1:
            assert cold.walk.process.running()
            cold.done = True
            cold.walk.process.stop()
    assert ways == [False, False, True]
    assert collector.failures == 0
    for name in OPERAND_COLUMNS:
        passed, walked = (np.asarray(book.rows[step, "m:input"][name], float) for step in (0, 2))
        np.testing.assert_allclose(passed, walked, rtol=2e-5, atol=1e-6, err_msg=name)


def test_one_process_compiles_however_often_it_is_asked(cold):
    assert not any(host.prepare() for _ in range(3))
    first = cold.walk.process
    assert not host.prepare()
    assert cold.walk.process is first
    assert not host.ready()


@pytest.mark.parametrize("why", ["nothing to start", "it failed"])
def test_without_such_a_process_a_thread_compiles(cold, monkeypatch, why):
    compiled = threading.Event()

    def call_all(module):
        in_a_thread(module)
        compiled.wait(60)

    monkeypatch.setattr(host_ready, "call_all", call_all)
    if why == "nothing to start":
        monkeypatch.setattr(host_ready.sys, "executable", None)
    else:
        cold.compiler.write_text("raise SystemExit(3)")
        assert not host.prepare()
        cold.walk.process.listen(60)
    assert not host.prepare()
    assert not host.prepare()  # nor does it wait for the thread
    assert not host.ready()
    compiled.set()
    cold.walk.beside.join()
    assert host.prepare()
    assert host.ready()


@pytest.mark.parametrize(
    ("name", "value"), [("executable", None), ("executable", ""), ("frozen", True)], ids=["none", "empty", "frozen"]
)
def test_no_process_is_started_by_what_is_no_python(name, value, cold, monkeypatch):
    """A frozen program would be started once more."""
    monkeypatch.setattr(host_ready.sys, name, value, raising=False)
    monkeypatch.setattr(host_ready, "call_all", in_a_thread)
    host.prepare()
    assert cold.walk.process is None
    cold.walk.beside.join()


def test_without_process_and_thread_passes_count(cold, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(host_ready.sys, "executable", None)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert not any(host.prepare() for _ in range(2))
    assert cold.walk.failed
    assert "no process and no thread" in host.why_not()


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
def test_a_time_limit_of_the_program_s_that_ends_meanwhile_is_its_own(cold, monkeypatch):
    def limit(number, frame):
        raise TimeoutError("theirs")

    before = signal.signal(signal.SIGALRM, limit)
    try:
        with monkeypatch.context() as late:
            late.setattr(host_ready, "call_all", lambda module: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(TimeoutError, match="theirs"):
                host.prepare()
    finally:
        signal.signal(signal.SIGALRM, before)
    cold.done = True
    assert host.prepare()


@forks
def test_a_fork_holds_nothing_of_the_process_that_compiles(cold):
    host.prepare()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if cold.walk.process is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cold.walk.process.running()


def test_where_one_compiles_others_wait():
    walk, inside, left = host.kernel(), threading.Event(), threading.Event()

    def enter():
        with alone(walk):
            inside.set()
        left.set()

    with alone(walk):
        waiting = threading.Thread(target=enter)
        waiting.start()
        if sys.platform != "win32":
            assert not inside.wait(0.1)
    assert left.wait(60)
    waiting.join()


def test_what_is_compiled_already_is_found_by_the_process():
    """It looks where this one does, without torch."""
    host.wait()
    run = f"import sys, runpy; runpy.run_path({host_compile.__file__!r}, run_name='__main__')"
    words = [sys.executable, "-P", "-c", f"{run}; print('torch' in sys.modules)"]
    before = {path: path.stat().st_mtime_ns for path in Path(host.kernel().operand.stats.cache_path).glob("host_*.nbc")}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        told = child.stdout.read()
        assert child.wait() == 0
    assert told.split() == [b"False"]
    after = {path: path.stat().st_mtime_ns for path in before}
    assert before == after
    assert before


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="its scheduler knows no idle processes")
def test_the_process_that_compiles_gives_way_and_for_some_time_takes_only_what_nobody_wants():
    policies = "print(os.sched_getscheduler(0), os.nice(0))"
    run = (
        f"import os, time; import host_compile; before = os.nice(0); host_compile.give_way(); {policies}; "
        f"host_compile.only_nice_after(0.2); time.sleep(1.0); {policies}; print(before + host_compile.POLITE)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(host_compile.__file__).parent)}
    told = subprocess.run([sys.executable, "-c", run], env=environment, capture_output=True, text=True, check=True)
    *lines, nice = told.stdout.splitlines()
    assert [line.split() for line in lines] == [[str(os.SCHED_IDLE), nice], [str(os.SCHED_OTHER), nice]]


BEGUN = """
import host_compile, sys, time
def took(seconds):
    print(seconds, flush=True)
def compiles(walk):
    time.sleep(60 if sys.argv[1] == "ends" else 0)
host_compile.only_nice_after, host_compile.call_all = took, compiles
host_compile.main()
"""


def test_who_comes_after_one_that_its_program_has_ended_is_half_as_patient(tmp_path):
    """Programs of ten seconds on a busy machine had the slow passes for ever."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(host_compile.__file__).parent),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }

    def patience(how):
        command = [sys.executable, "-c", BEGUN, how]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=environment, **pipes, text=True) as process:
            told = process.stdout.readline()
            if how == "ends":
                process.stdin.close()
            assert process.wait() == (how == "ends")
        return float(told)

    all_of_it = host_compile.IDLE_SECONDS
    assert [patience("ends") for _ in range(3)] == [all_of_it, all_of_it / 2, all_of_it / 4]
    assert patience("finishes") == all_of_it / 8
    assert patience("finishes") == all_of_it
    assert not list(tmp_path.rglob(host_compile.UNFINISHED))


def test_where_nobody_ever_finishes_nobody_waits(tmp_path):
    (tmp_path / host_compile.UNFINISHED).write_bytes(b"." * 5000)
    with host_compile.patiently(tmp_path) as seconds:
        assert seconds == 0.0


PROGRAM = """
import os, signal, sys
import torch
from narrowgauge.observe.stats import host_ready, host
host_ready.WALK, host_ready.kernel = host_ready.Walk(), host_ready.kernel.__wrapped__
for name in [name for name in sys.modules if name.startswith("narrowgauge.observe.stats.host_")]:
    if name.rpartition("_")[2] in ("kernel", "bits", "rounding", "sample", "scales"):
        del sys.modules[name]
        vars(sys.modules["narrowgauge.observe.stats"]).pop(name.rpartition(".")[2])
import numba
numba.config.CACHE_DIR = os.environ["COLD"]
if not os.environ["COLD"]:  # nowhere to write to
    from numba.core import caching
    caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]
os.environ["NUMBA_CACHE_DIR"] = os.environ["COLD"]
assert not host.prepare() and not host.ready()
place = host_ready.cache_of_ours().get("NUMBA_CACHE_DIR", "")
from pathlib import Path
def told(pid):
    try:
        return (Path("/proc") / pid / "cmdline").read_bytes().split(b"\\0")
    except OSError:
        return []
def found():
    words = [sys.executable.encode(), b"-P", host_ready.host_compile.__file__.encode(), b""]
    ours = os.fstat(host_ready.WALK.process._out).st_ino
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if told(pid) == words and os.path.exists(f"/proc/{pid}/fd/1") and os.stat(f"/proc/{pid}/fd/1").st_ino == ours:
            return pid
import time
while not (pid := found()):
    assert host_ready.WALK.process.running()
    time.sleep(0.01)
try:
    met = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    met = None
assert met is None, met
print(pid, place or "-", flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@forks
@proc
@pytest.mark.parametrize("end", ["killed", "normal"])
@pytest.mark.parametrize("writable", [True, False])
def test_the_process_ends_with_the_program_and_a_cache_that_had_no_place_is_one_per_user(
    end, writable, tmp_path, warm_python
):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = dict(os.environ) | {"COLD": str(tmp_path / "cold") if writable else "", "TMPDIR": str(tmp_path)}
    done = warm_python.run([sys.executable, "program.py", end], cwd=tmp_path, env=environment)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    pid, place = done.stdout.split()
    assert (place == "-") == writable
    for _ in range(600):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        threading.Event().wait(0.1)
    else:
        raise AssertionError(f"{pid} goes on")
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("narrowgauge-")]
    assert left == ([] if writable else [f"narrowgauge-cache-{os.geteuid()}"])  # where the next one finds it


@forks
@pytest.mark.parametrize("trouble", ["", "open to others", "a link", "a file"])
def test_the_cache_of_a_user_is_only_taken_where_nobody_else_could_write(tmp_path, monkeypatch, trouble):
    monkeypatch.setattr(host_ready.tempfile, "tempdir", str(tmp_path))
    removed = []
    monkeypatch.setattr(host_ready.atexit, "register", removed.append)
    mine = tmp_path / f"narrowgauge-cache-{os.geteuid()}"
    if trouble == "open to others":
        mine.mkdir()
        mine.chmod(0o777)
    elif trouble == "a link":
        mine.symlink_to(tmp_path)
    elif trouble:
        mine.touch()
    first, second = (host_ready._temporary.__wrapped__() for _ in range(2))
    assert (first == second == str(mine)) == (not trouble)
    assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in (first, second))
    for remove in removed:
        remove()
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]
