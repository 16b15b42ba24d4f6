"""How a run of several ranks ended, by what each rank's manifest says of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from narrowgauge.cli.outcome import unended
from narrowgauge.observe.report import facts
from narrowgauge.observe.report.text import lines
from narrowgauge.observe.store import RunWriter, ends, open_run
from narrowgauge.observe.store import manifest as manifests

GONE = {"pid": 2**22 + 1, "started": 1, "host": socket.gethostname()}  # no system counts that far
ELSEWHERE = {**GONE, "host": "another-machine"}
HERE = {"pid": os.getpid(), "started": manifests.process_started(os.getpid()), "host": socket.gethostname()}


def made(folder, *ranks, world=0):
    """A run of which each rank says (status, process, further); None: it wrote nothing."""
    folder.mkdir(exist_ok=True)
    for rank, said in enumerate(ranks):
        if said is None:
            continue
        status, process, further = (*said, {})[:3]
        meta = {"ranks": {"world": world}} if world else {}
        manifest = {**manifests.fresh(rank, meta), "status": status, "process": process, **further}
        manifests.write(folder, manifest)
    return open_run(folder)


FULL = ("stopped", GONE, {"reason": "disk full"})
FAILED = ("failed", GONE, {"meta": {"error": "E: a\nb"}})
CUT_OFF = ("failed", GONE, {"meta": {"error": "E: peer"}, "ended": "2026-11-29T08:00:02.000+00:00"})
CAUSE = ("failed", GONE, {"meta": {"error": "E: a"}, "ended": "2026-11-29T08:00:01.000+00:00"})
WELL, KILLED, WRITES, FAR = ("complete", GONE), ("running", GONE), ("running", HERE), ("running", ELSEWHERE)


@pytest.mark.parametrize(
    ("ranks", "world", "status", "words"),
    [
        ((WELL,), 0, "complete", ""),
        ((KILLED,), 0, "killed", ""),
        ((WELL, WELL), 2, "complete", ""),
        ((WELL, WELL), 0, "complete", ""),  # a run of an older version
        ((WELL, KILLED), 2, "killed", "rank 1 of 2 was killed"),
        ((WELL, KILLED), 0, "killed", "rank 1 of 2 was killed"),
        ((KILLED, WELL), 2, "killed", "rank 0 of 2 was killed"),
        ((KILLED, KILLED), 2, "killed", "all 2 ranks were killed"),
        ((WRITES, KILLED), 2, "running", "rank 1 of 2 was killed; rank 0 of 2 is still running"),
        ((WELL, WRITES), 2, "running", "rank 1 of 2 is still running"),
        ((WRITES, WRITES), 2, "running", ""),
        ((FAR, FAR), 2, "running", ""),
        ((WELL, FAR), 2, "running", "rank 1 of 2 was not seen to end"),
        ((WELL, FAR, KILLED), 3, "killed", "rank 2 of 3 was killed; rank 1 of 3 was not seen to end"),
        ((FULL, WELL), 2, "stopped", "rank 0 of 2 was no longer watched (disk full)"),
        ((WELL, FAILED, KILLED), 3, "failed", "rank 1 of 3 failed (E: a); rank 2 of 3 was killed"),
        ((CUT_OFF, CAUSE), 2, "failed", "all 2 ranks failed (first rank 1: E: a)"),
        ((CAUSE, CUT_OFF, WELL), 3, "failed", "ranks 0 and 1 of 3 failed (first rank 0: E: a)"),
        ((CAUSE, CAUSE), 2, "failed", "all 2 ranks failed (E: a)"),
        ((WELL, None, WELL, None, None, None), 6, "complete", "ranks 1 and 3 to 5 of 6 recorded nothing here"),
    ],
)  # fmt: skip
def test_a_run_is_what_its_ranks_say(tmp_path, ranks, world, status, words):
    run = made(tmp_path / "run", *ranks, world=world)
    assert (run.status, run.ends.words) == (status, words)
    assert next(lines(run)).startswith(f"status {status}" + (f": {words}" if words else ""))
    assert words in facts.how_it_ended(run)
    assert repr(run.ends) == f"<ends of a run: {words or status}>"


def test_a_watch_that_stopped_says_why_wherever_its_run_is_told(tmp_path):
    """Of one process alone; the program that was watched may have gone on, and failed."""
    run = made(tmp_path, FULL)
    assert (run.status, run.ends.words) == ("stopped", "stopped: disk full")
    assert unended(tmp_path, 0) == ["stopped: disk full; what was written is kept."]
    assert next(lines(run)) == "status stopped: disk full"
    assert facts.how_it_ended(run) == "stopped: disk full"
    run = made(tmp_path, (*FULL[:2], {"reason": "disk full", "meta": {"error": "E: a"}}))
    assert facts.how_it_ended(run) == "stopped: disk full; the program ended with an error: E: a"
    assert made(tmp_path, FULL[:2]).ends.words == ""  # by its writer's caller, who says no reason
    assert unended(tmp_path, 0) == []


def test_a_rank_that_did_not_end_is_told_and_one_that_recorded_nothing_only_of_a_command_that_failed(tmp_path):
    made(tmp_path / "run", WELL, KILLED, world=2)
    made(tmp_path / "run" / "restart-1", WELL, None, world=2)
    killed = "rank 1 of 2 was killed; what was written is kept."
    nothing = "restart-1: rank 1 of 2 recorded nothing here; what was written is kept."
    assert unended(tmp_path / "run", 0) == [killed]
    assert unended(tmp_path / "run", 1) == [killed, nothing]
    assert unended(tmp_path / "none", 1) == []
    (tmp_path / "run" / "run.json").write_text("{")
    (told,) = unended(tmp_path / "run", 0)
    assert "run.json is not valid JSON" in told


def test_a_run_that_was_opened_while_it_was_written_has_ended_since(tmp_path):
    run = made(tmp_path / "run", WRITES, WRITES, world=2)
    assert run.status == "running"
    made(tmp_path / "run", WELL, WELL, world=2)
    assert run.status == "complete"


def test_a_rank_of_an_attempt_that_was_continued_without_it_does_not_count(tmp_path):
    made(tmp_path / "run", WELL, KILLED)
    with RunWriter(tmp_path / "run", resume=True):
        pass
    assert open_run(tmp_path / "run").status == "complete"


def test_a_manifest_of_a_rank_that_cannot_be_read_is_no_end(tmp_path):
    made(tmp_path / "run", WELL, WELL)
    (tmp_path / "run" / "run.rank1.json").write_text("{")
    assert open_run(tmp_path / "run").status == "unknown"


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system has no /proc")
def test_a_process_that_ended_and_was_not_asked_for_is_gone(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = {"pid": child.pid, "started": manifests.process_started(child.pid), "host": socket.gethostname()}
    run = made(tmp_path / "run", WELL, ("running", process), world=2)
    assert run.status == "running"
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert run.status == "killed"
    child.communicate()


def test_of_many_ranks_what_has_ended_is_read_once(tmp_path, monkeypatch):
    run = made(tmp_path / "run", *[WELL] * 300, KILLED, world=301)
    assert run.status == "killed"
    read, files = json.loads, []
    monkeypatch.setattr(ends.manifests.json, "loads", lambda t: files.append(1) or read(t))
    began = time.perf_counter()
    assert run.ends.words == "rank 300 of 301 was killed"
    assert len(files) <= 2
    assert time.perf_counter() - began < 1


def last_sign(folder, rank, seconds):
    """That long ago."""
    then = time.time() - seconds
    os.utime(folder / manifests.name(rank), (then, then))


@pytest.mark.parametrize(
    ("ranks", "seconds", "status", "words"),
    [
        ((FAR,), (90,), "silent", "no sign of life for 90 s"),
        ((FAR,), (30,), "running", ""),
        ((WRITES,), (9e9,), "running", ""),  # its process is asked
        ((KILLED,), (9e9,), "killed", ""),
        ((WELL, FAR), (0, 90), "silent", "rank 1 of 2 has given no sign of life for 90 s"),
        ((WELL, FAR), (9e9, 5), "running", "rank 1 of 2 was not seen to end"),
        ((FAR, FAR, FAR), (5, 90, 7300), "silent",
         "ranks 1 and 2 of 3 have given no sign of life for 90 s; rank 0 of 3 was not seen to end"),
        ((FAR, KILLED), (3600, 0), "killed",
         "rank 1 of 2 was killed; rank 0 of 2 has given no sign of life for 60 min"),
        ((FAR, WRITES), (90, 0), "running",
         "rank 0 of 2 has given no sign of life for 90 s; rank 1 of 2 is still running"),
    ],
)  # fmt: skip
def test_a_process_on_another_host_is_judged_by_its_signs_of_life(tmp_path, ranks, seconds, status, words):
    run = made(tmp_path / "run", *ranks, world=len(ranks))
    for rank, each in enumerate(seconds):
        last_sign(run.path, rank, each)
    assert (run.status, run.ends.words) == (status, words)
    assert words in facts.how_it_ended(run)
    assert bool(unended(run.path, 0)) == bool(words)


def test_one_that_gives_signs_of_life_again_is_running(tmp_path):
    run = made(tmp_path / "run", FAR, FAR, world=2)
    last_sign(run.path, 1, 90)
    assert run.status == "silent"
    last_sign(run.path, 1, -3)  # by another clock
    assert run.status == "running"


def test_a_writer_that_has_nothing_to_write_gives_signs_of_life(tmp_path):
    with RunWriter(tmp_path, flush_seconds=0.02):
        before = (tmp_path / "run.json").read_bytes()
        last_sign(tmp_path, 0, 90)
        until = time.monotonic() + 20
        while manifests.silence(tmp_path, 0) > 60 and time.monotonic() < until:
            time.sleep(0.01)
        assert manifests.silence(tmp_path, 0) < 60
        assert (tmp_path / "run.json").read_bytes() == before
