"""The walk's passes are shared out among torch's threads: the same numbers, by all of them, and never in a fork."""

import os
import platform
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from numba import njit
from numba.np.numpy_support import carray

from narrowgauge.compute.quant import CURRENT, Block, PerColumn, PerRow, PerTensor, quantize
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN
from narrowgauge.observe.stats import host, host_team, team
from narrowgauge.observe.stats.host_bits import pointer

SHARED = sys.platform == "linux" and torch.backends.openmp.is_available()
needs_a_team = pytest.mark.skipif(not SHARED, reason="torch has no OpenMP here whose threads could be asked")


@pytest.fixture
def threads():
    """Sets how many threads torch computes with."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@njit
def _note(data):
    told = carray(pointer(data), (66,), np.int64)
    team_at = told[0]
    here = carray(pointer(team_at), (4,), np.int64)
    number = host_team.ask(here[1])
    told[1] = host_team.ask(here[2])
    told[2 + number] += 1


_by_all = host_team.by_all(_note)


@njit
def _everybody(team_at, told, size):
    run, threads = host_team.whom(team_at, size)
    if run:
        _by_all(run, np.int64(told.ctypes.data), threads)
    return threads


@needs_a_team
@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_thread_of_torchs_has_a_part_and_small_work_none(count, threads):
    threads(count)
    told = np.zeros(66, np.int64)
    told[0] = team.address()
    assert _everybody(team.address(), told, host_team.GRAIN) == count
    assert told[1:].tolist() == [count, *[1] * count, *[0] * (64 - count)]
    told[1:] = 0
    for size, most in ((host_team.GRAIN - 1, count), (host_team.GRAIN, 1)):
        threads(most)
        assert _everybody(team.address(), told, size) == 1
    assert not told[1:].any()


def counted(x, rule, codes=None):
    shares = (0, 3), (1, 2)
    moments = host.judge(x, rule, *shares) if codes is None else host.count(x, codes, *shares)
    return None if moments is None else (moments.vector.tobytes(), moments.columns.tobytes())


@needs_a_team
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerColumn(), Block(1, 128), Block(128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(513, 257), (1, 40_000), (40_000, 1), (200, 1000), (130, 128), (70, 9000), (64, 600)]
)
def test_the_numbers_are_the_same_to_the_last_bit(shape, dtype, granularity, threads):
    """Of rules and of codes; also of a matrix of which only the second half of the walk is shared."""
    host.wait()
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
    rule = Operand(E4M3FN, granularity, CURRENT)
    codes = quantize(x.float(), E4M3FN, granularity, scaling=CURRENT)
    for made in (None, codes):
        found = []
        for count in (1, 2, 3, 7, 17):
            threads(count)
            found.append(counted(x, rule, made))
        assert found[0] is not None
        assert found == [found[0]] * 5
    codes.codes.view(torch.uint8)[-1, -1] = 0x7F  # no number, seen by the last thread
    assert counted(x, rule, codes) is None
    x[-1, -1] = torch.nan
    assert counted(x, rule) is None
    x[-1, -1], x[0, 0] = 1, torch.inf
    assert counted(x, rule) is None


@needs_a_team
def test_the_norm_of_weights_is_the_same_to_the_last_bit_and_right(threads):
    host.wait()
    torch.manual_seed(0)
    weights = [torch.randn(size) for size in (7, 70_001, 16_384, 1, 100_000)]
    ats = np.array([w.data_ptr() for w in weights])
    sizes = np.array([w.numel() for w in weights])
    copies, held = np.zeros(sizes.sum(), np.float32), np.zeros(5, np.int64)
    starts = copies.ctypes.data + 4 * (np.cumsum(sizes) - sizes)
    found = []
    for count in (1, 2, 3, 7):
        threads(count)
        found.append(host.kernel().copied(ats, starts, sizes, 1, 0, held, team.address()))
    assert found == [found[0]] * 4
    everything = torch.cat(weights).double()
    assert found[0] == pytest.approx(everything.square().sum().item(), rel=1e-12)
    assert torch.equal(torch.from_numpy(copies).double(), everything)


@needs_a_team
def test_threads_of_a_program_have_teams_of_their_own(threads):
    host.wait()
    threads(3)
    x, rule = torch.randn(300, 300), Operand(E4M3FN, PerTensor(), CURRENT)
    want, found = counted(x, rule), []

    def count():
        torch.set_num_threads(2)
        found.extend(counted(x, rule) for _ in range(50))

    beside = [threading.Thread(target=count) for _ in range(3)]
    for thread in beside:
        thread.start()
    for thread in beside:
        thread.join(60)
    assert found == [want] * 150


FORKS = """
    import os, sys, time, torch
    {before}
    torch.set_num_threads(3)
    torch.randn(1000, 1000).exp().sum()  # torch's threads are there
    def found():
        from narrowgauge.compute.recipes import by_name
        from narrowgauge.observe.stats import host, team
        host.wait()
        torch.manual_seed(0)
        x, rule = torch.zeros(512, 64), by_name("current").uses("input")[0]
        x[0] = torch.arange(64)
        return host.judge(x, rule, (0, 3), (1, 2)).vector.tobytes(), bool(team._TEAM.any())
    {first}
    child = os.fork()
    if not child:
        moments, shared = found()
        os._exit(7 if not shared else 1)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        sys.exit("the child hangs")
    print(os.waitstatus_to_exitcode(status), found()[1])
"""


@needs_a_team
@pytest.mark.parametrize("counted_before", [False, True])
@pytest.mark.parametrize("loaded", ["", "from narrowgauge.observe.stats import team"])
def test_a_fork_counts_alone(loaded, counted_before):
    """Also one that loads us, or counts, before its parent does."""
    program = FORKS.format(before=loaded, first="found()" if counted_before else "")
    made = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert made.stdout.split() == ["7", "True"], made.stderr[-2000:]


@needs_a_team
def test_the_team_is_as_large_as_torch_has_it_also_in_a_thread_that_never_asked():
    program = """
        import os, threading, time, torch
        from narrowgauge.compute.recipes import by_name
        from narrowgauge.observe.stats import host
        from narrowgauge.observe.stats.again import Gate, Watched, here
        from narrowgauge.observe.stats.held import Held
        host.wait()
        torch.set_num_threads(1)
        x, rule = torch.zeros(512, 512), by_name("current").uses("input")[0]
        step, known = Held(1, 2, looks=list), host.as_before(x, rule, (3, 2))
        again = here(Watched(print, open=True, held={x.device: step}), Gate(), "a:input", False, x, known, rule)
        before = len(os.listdir("/proc/self/task"))
        def count():
            for _ in range(3):
                host.judge(x, rule, (0, 3), (0, 2))
        def count_again():
            assert again(x, rule, None)
        for work in (count, count_again):
            beside = threading.Thread(target=work)
            beside.start()
            beside.join()
        until = time.monotonic() + 20  # a thread that was joined may yet be leaving; a team's stays
        while len(os.listdir("/proc/self/task")) > before and time.monotonic() < until:
            time.sleep(0.01)
        print(len(os.listdir("/proc/self/task")) - before)
    """
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        **{"capture_output": True, "text": True, "timeout": 100, "env": os.environ | {"OMP_NUM_THREADS": "5"}},
    )
    assert made.stdout.split() == ["0"], made.stderr[-2000:]


HELD = """
    import os, zlib
    import numpy as np, torch
    from narrowgauge.compute.quant import CURRENT, Block, PerTensor, quantize
    from narrowgauge.compute.recipes import Operand
    from narrowgauge.formats import E4M3FN
    from narrowgauge.observe.stats import host, team
    host.wait()
    torch.set_num_threads(5)
    for granularity in (PerTensor(), Block(1, 128)):
        for shape in ((300, 300), (70, 9000), (20, 20)):
            torch.manual_seed(0)
            x, rule = torch.randn(shape), Operand(E4M3FN, granularity, CURRENT)
            x[0, 0] = 1e6  # some are flushed
            codes = quantize(x, E4M3FN, granularity, scaling=CURRENT)
            for found in (host.judge(x, rule, (0, 3), (1, 2)), host.count(x, codes, (0, 3), (1, 2))):
                print(zlib.crc32(found.vector.tobytes() + found.columns.tobytes()))
    at, held, copies = np.array([x.data_ptr()]), np.zeros(1, np.int64), np.zeros(400, np.float32)
    print(host.kernel().copied(at, np.array([copies.ctypes.data]), np.array([400]), 1, 0, held, team.address()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc fills what is freed")
def test_what_threads_have_addresses_of_is_held():
    # An array is freed behind its last use, and an address is none. What is freed is filled, and the large is gone.
    found = []
    watched = {"MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "2048"}
    watched["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"
    for settings in ({}, watched, watched | {"OMP_THREAD_LIMIT": "2"}):  # fewer than are asked for
        made = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(HELD)],
            **{"capture_output": True, "text": True, "timeout": 100, "env": os.environ | settings},
        )
        assert made.returncode == 0, made.stderr[-2000:]
        found.append(made.stdout.split())
    assert found == [found[0]] * 3
    assert len(found[0]) == 13


def refuse(name):
    raise TypeError("as Windows says of the whole process")


@pytest.mark.parametrize("lacks", ["OpenMP", "a function", "the door"])
def test_without_what_it_takes_nothing_is_shared(lacks, monkeypatch):
    if lacks == "OpenMP":
        monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
    if lacks == "a function":
        monkeypatch.setattr(team, "FUNCTIONS", (*team.FUNCTIONS[:3], "omp_get_no_such_thing"))
    if lacks == "the door":
        monkeypatch.setattr(team.ctypes, "CDLL", refuse)
    assert team._found() == [0] * 4
    nobody = np.zeros(4, np.int64)
    assert _everybody(nobody.ctypes.data, np.zeros(66, np.int64), host_team.GRAIN) == 1
    assert _everybody(0, np.zeros(66, np.int64), host_team.GRAIN) == 1
