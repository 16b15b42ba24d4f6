"""A tracker has what all ranks say of a step, once, however few steps a segment holds: two ranks under torchrun."""

import json
import re

import pytest
from tests.ports import free_port
from tests.session.test_watch import PLAIN, run

from narrowgauge.observe.store import open_run

STEPS, EVERY, PER_SEGMENT, BATCH = 24, 6, 2, 16  # a step is merged six to twelve after it was made: many segments later
PROGRAM = f"""
import json, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from narrowgauge.observe.store import RunWriter

begin, writers = RunWriter.__init__, []
def begun(self, *args, **options):
    begin(self, *args, **options)
    writers.append(self)
RunWriter.__init__ = begun

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, losses = torch.Generator().manual_seed(dist.get_rank()), []
for step in range(1, {STEPS} + 1):
    loss = model(torch.randn({BATCH}, 8, generator=data)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    time.sleep(0.02)
    if step % {PER_SEGMENT} == 0 and dist.get_rank() == 0:
        assert writers[0].flush()
with open(f"losses{{dist.get_rank()}}.json", "w") as file:
    json.dump(losses, file)
print("finished")
dist.destroy_process_group()
"""
EXPORT = '[export]\ntensorboard = { dir = "board" }\nprometheus = { file = "x.prom" }\n'


@pytest.mark.timeout(300)
def test_a_tracker_has_of_every_step_what_all_ranks_say_and_that_once(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "ng.toml").write_text(EXPORT)
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()))
    options, env = ("--every", str(EVERY), "--config", "ng.toml"), {**PLAIN, "OMP_NUM_THREADS": "1"}
    done = run(tmp_path, *launcher, "train.py", options=options, script=PROGRAM, env=env)
    assert (done.returncode, done.stdout.count("finished")) == (0, 2), done.stderr
    assert "export" not in done.stderr
    assert open_run(tmp_path / "out").meta["ranks"]["merged_steps"] == STEPS // EVERY

    both = [json.loads((tmp_path / f"losses{rank}.json").read_text()) for rank in range(2)]
    losses = {step: sum(each) / 2 for step, each in enumerate(zip(*both, strict=True), 1)}
    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    for name, wanted in (("loss", losses), ("tokens", dict.fromkeys(losses, 2.0 * BATCH))):
        found = [(event.step, event.value) for event in read.Scalars(f"run/{name}")]
        assert [step for step, _ in found] == list(range(1, STEPS + 1))
        assert dict(found) == pytest.approx(wanted, rel=1e-6)
    gauges = (tmp_path / "x.prom").read_text()
    assert gauge(gauges, "loss") == pytest.approx(losses[STEPS], rel=1e-6)
    assert gauge(gauges, "tokens_so_far") == 2 * BATCH * STEPS


def gauge(text, name):
    return float(re.search(rf"^narrowgauge_{name}{{\S* (\S+)$", text, re.M)[1])
