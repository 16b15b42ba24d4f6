"""A writer killed at any moment leaves a run that can be read, merged and continued, whole up to its last segment.

    one Python process, which has opened nothing yet
      fork -> write 5 steps, merging on the way; close; compact       killed by SIGKILL at file operation 1
      fork -> the same                                                ... at file operation 2, and so on
      fork -> the same                                                ... at a random moment, amid DuckDB's writing too

After every flush the step is noted outside of the run: what is noted must be there.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

from narrowgauge.cli.main import main
from narrowgauge.observe.store import RunWriter, compact, open_run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
STEPS, SITES, MOMENTS = 5, 3, 8

PROGRAM = """
import json, os, random, signal, sys
from pathlib import Path
import numpy
from narrowgauge.observe.store import RunWriter, compact, compaction
base, steps, sites, moments = Path(sys.argv[1]), *map(int, sys.argv[2:])
compaction.FAN_IN = 2

def scenario(folder, note):
    with RunWriter(folder, {"command": "train.py"}) as writer:
        for step in range(1, steps + 1):
            names = [f"layers.{number}:input" for number in range(sites)]
            writer.add_tensors(step, names, {"amax": numpy.full(sites, float(step))})
            writer.add_scalars(step, loss=1.0 / step, lr=0.5)
            writer.add_event(step, "skipped", f"step {step}")
            assert writer.flush()
            note(step)
    note("closed")
    compact(folder)
    note("compacted")

CHANGES = {"os.rename", "os.remove", "os.link", "os.mkdir", "open"}
def forked(name, arm):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    notes = os.open(base / f"{name}.notes", os.O_CREAT | os.O_WRONLY)
    arm(base / name)
    scenario(base / name, lambda what: os.write(notes, f"{what}\\n".encode()))
    os._exit(0)

def at_operation(number):
    def arm(folder):
        done = 0
        def hook(event, words):
            nonlocal done
            if event not in CHANGES or not str(words[0]).startswith(str(folder)):
                return
            if event == "open" and "w" not in str(words[1]) and "x" not in str(words[1]):
                return
            done += 1
            if number == 0:
                (base / "count").write_text(str(done))
            elif done == number:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
    return arm

def at_moment(seconds):
    return lambda folder: signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM kills, too: nobody handles it

ended = {"whole": forked("whole", at_operation(0))}
for number in range(1, int((base / "count").read_text()) + 1):
    ended[f"operation-{number}"] = forked(f"operation-{number}", at_operation(number))
chance = random.Random(7)
for number in range(moments):
    ended[f"moment-{number}"] = forked(f"moment-{number}", at_moment(0.01 + 0.5 * chance.random()))
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder, and of every run the signal that ended it (0: it came to its end)."""
    base = tmp_path_factory.mktemp("killed")
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), base, STEPS, SITES, MOMENTS]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return base, json.loads(done.stdout)


def check(folder, least, most=STEPS):
    """Every row of the steps 1..n once, n from `least` to `most`; returns n of each kind."""
    run = open_run(folder)
    scalars = run.scalars("loss")
    events = run.events()["message"].tolist()
    tensors = Counter(int(step) for step in run.tensors()["step"]) if run.sites else {}
    seen = {"scalars": len(scalars["step"]), "events": len(events), "tensors": len(tensors)}
    assert scalars["step"].tolist() == list(range(1, seen["scalars"] + 1))
    assert scalars["loss"].tolist() == [1.0 / step for step in scalars["step"]]
    assert events == [f"step {step}" for step in range(1, seen["events"] + 1)]
    assert tensors == dict.fromkeys(range(1, seen["tensors"] + 1), SITES)
    for site in run.sites:
        steps, amax = run.series(site, "amax")
        assert amax.tolist() == steps.tolist() == list(range(1, seen["tensors"] + 1))
    assert all(least <= count <= most for count in seen.values()), (seen, least)
    return run


def test_every_kill_leaves_a_readable_run(killed, capsys):
    base, ended = killed
    assert ended.pop("whole") == 0
    hit = {name for name, status in ended.items() if status}
    assert {name for name in ended if name.startswith("operation")} <= hit
    assert len(hit) > 60
    stages = Counter()
    for name in ended:
        notes = (base / f"{name}.notes").read_text().split()
        flushed = max((int(note) for note in notes if note.isdigit()), default=0)
        stages[notes[-1] if notes and not notes[-1].isdigit() else "writing"] += name in hit
        folder = base / name
        if not (folder / "run.json").exists():
            assert flushed == 0  # it was not yet begun
            continue
        run = check(folder, flushed, min(STEPS, flushed + 1))
        if "closed" in notes:
            assert run.status == "complete"
        elif flushed < STEPS:
            assert run.status == "killed"
        if int(name.rpartition("-")[2]) % 5 == 0:
            main(["report", str(folder), "--text"])
    print(len(hit), stages)
    assert stages["writing"] > 40
    assert stages["closed"] > 5  # that is: in the midst of compacting
    assert "Traceback" not in capsys.readouterr().err


def test_what_a_kill_left_can_be_merged_and_continued(killed):
    base, ended = killed
    for name in [name for name in ended if name.startswith("operation")][::6]:
        folder = base / name
        if not (folder / "run.json").exists():
            continue
        before = check(folder, 0).scalars("loss").rows
        with RunWriter(folder, resume=True) as writer:
            writer.add_scalars(before + 1, loss=1.0 / (before + 1), lr=0.5)
        assert open_run(folder).scalars("loss").rows == before + 1
        if before:
            compact(folder)
        assert open_run(folder).scalars("loss").rows == before + 1
        assert not [path for path in folder.rglob(".*") if path.suffix == ".parquet"]
