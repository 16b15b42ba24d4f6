"""A clock that is set by days, back and forth, while two ranks train and a tracker follows: all goes on in order."""

import json
import re

import pytest
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import PLAIN

from narrowgauge.observe.export.tail import Tail
from narrowgauge.observe.store import open_run

# What waits for the writer's next segment is written at once, in place of every ten seconds; then the program waits for
# the tracker, which asks every second, and is a segment behind.
PROGRAM = """
import json, os, time
true, days = time.time, [0]
time.time = lambda: true() + days[0] * 86400
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(rank)
said, exported = [], ""
for step, days[0] in enumerate([0, 3, -2, 400, 0, -5, 365, -1000, 0, 7, -7, 0], 1):
    loss = model(torch.randn(16, 32, generator=data)).square().mean()
    loss.backward()
    said.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step in (5, 10):
        from narrowgauge.session.process.live import Live
        Live.current.writer.flush()
        until = time.monotonic() + 60
        while step == 10 and "narrowgauge_loss{" not in exported and time.monotonic() < until:
            time.sleep(0.1)
            exported = open("out/metrics.prom").read() if os.path.exists("out/metrics.prom") else ""
    dist.barrier()
with open(f"said{rank}.json", "w") as file:
    json.dump({"losses": said, "exported": exported}, file)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_clock_that_jumps_by_days_disturbs_neither_ranks_nor_trackers(warm_python, tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "ng.toml").write_text("[watch]\nevery = 2\nranks = true\n[export]\nprometheus = true\n")
    words = ["python", RANKS, "2", str(free_port()), "train.py"]
    command = ["run", "--config", "ng.toml", "--out", "out", "--", *words]
    done = warm_python.narrowgauge(command, cwd=tmp_path, env=PLAIN)
    assert (done.returncode, done.stderr) == (0, "narrowgauge: the run is in out\n")
    ranks = [json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in (0, 1)]
    losses = [sum(pair) / 2 for pair in zip(*(said["losses"] for said in ranks), strict=True)]
    steps = list(range(1, 13))

    run, own = open_run(tmp_path / "out"), open_run(tmp_path / "out" / "ranks")
    assert (run.status, own.status, run.meta["ranks"]["merged_steps"]) == ("complete", "complete", 6)
    when = run.sql("SELECT wall_time FROM scalars")["wall_time"]
    assert when.max() - when.min() > 1300 * 86400  # rows say what the clock said
    table = run.scalars()
    assert table["step"].tolist() == steps
    assert table["loss"].tolist() == pytest.approx(losses, rel=1e-6)
    for rank in (0, 1):
        alone = own.scalars("loss", rank=rank)
        assert (alone["step"].tolist(), alone["loss"].tolist()) == (steps, pytest.approx(ranks[rank]["losses"]))
    for each in (table, *(own.scalars("step_seconds", rank=rank) for rank in (0, 1))):
        seconds = each["step_seconds"]
        assert (seconds >= 0).all()
        assert (seconds < 600).all()  # laps are taken by a clock that nobody sets
    seen = run.tensors(["numel"], sites=["(model):input"])
    assert (seen["step"].tolist(), set(seen["numel"].tolist())) == (list(range(2, 13, 2)), {2 * 16 * 32})

    gauges = gauges_of(ranks[0]["exported"])
    assert 0 < gauges["step"] < 10  # while it trained, behind some jumps
    told = [each[int(gauges["step"]) - 1] for each in (losses, ranks[0]["losses"])]  # all ranks', or not yet
    assert any(gauges["loss"] == pytest.approx(loss, rel=1e-6) for loss in told)
    gauges = gauges_of((tmp_path / "out" / "metrics.prom").read_text())
    assert (gauges["step"], gauges["up"], gauges["tensors_step"]) == (12, 0, 12)
    assert gauges["loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert gauges["tokens_so_far"] == 12 * 2 * 16
    assert 0 <= gauges["step_seconds"] < 600
    points = [point for batch in Tail(tmp_path / "out").points(final=True) for point in batch]
    assert [point.step for point in points] == steps


def gauges_of(text):
    """The gauges without labels of their own."""
    found = re.findall(r"^narrowgauge_(\w+)\{run=\"[^\"]*\"\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
