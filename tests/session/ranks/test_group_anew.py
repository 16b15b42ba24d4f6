"""A program takes the group of its ranks down, and makes another at the same address, or trains on without one.

Where rank 0's process has the store, torch finds that one again as long as anybody in the process holds it: with the
addresses at which the ranks of the group before listened, to which the next ones would connect in vain.
"""

import threading

import pytest
import torch.distributed as dist
from tests.session.ranks.pairs import started

from narrowgauge.observe.store import open_run
from narrowgauge.session.doors import groups
from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.ranks.meeting import Met
from narrowgauge.session.ranks.old_store import OldStore

PROGRAM = """
import json, os, sys, time, torch
from torch import distributed as dist
from torch.distributed import destroy_process_group
from torch import nn
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for turn in range(2):
    if turn == 0 or sys.argv[1] == "again":
        dist.init_process_group("gloo")
    for step in range(3):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(100 * turn + 10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        if dist.is_initialized():
            for p in model.parameters():
                dist.all_reduce(p.grad)
        if sys.argv[1] != "apart" or rank == 0:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.is_initialized():
        dist.barrier()
        destroy_process_group()
        time.sleep(1 - rank)  # the other one asks rank 0's address for the store meanwhile
print(json.dumps(losses), flush=True)
"""


def trained(warm_python, folder, port, word, **watch):
    ranks = started(warm_python, folder, port, PROGRAM, word, **watch)
    assert [rank.wait(120) for rank in ranks] == [0, 0], [(folder / f"said{r}").read_text() for r in (0, 1)]
    said = [(folder / f"said{rank}").read_text().splitlines()[-1] for rank in (0, 1)]
    run = open_run(folder / "out")
    assert run.status == "complete"
    return run, [[float(loss) for loss in each.strip("[]").split(",")] for each in said]


def test_ranks_that_meet_again_in_another_group_merge_there_too(warm_python, tmp_path, free_port):
    run, losses = trained(warm_python, tmp_path, free_port, "again", ranks=True)
    assert run.meta["ranks"] == {"world": 2, "merged_steps": 6, "apart_steps": 0, "backend": "gloo"}
    assert (run.ranks, run.events("ranks_apart").rows) == ((0,), 0)
    table = run.tensors(columns=["ranks"])
    assert set(table["ranks"].tolist()) == {2}
    mean = [sum(each) / 2 for each in zip(*losses, strict=True)]
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(mean, rel=1e-6)
    own = open_run(tmp_path / "out" / "ranks")
    assert own.ranks == (0, 1)
    assert sorted(set(own.tensors(columns=[])["step"].tolist())) == [1, 2, 3, 4, 5, 6]


def test_a_program_without_its_group_trains_on_each_rank_for_itself(warm_python, tmp_path, free_port):
    run, losses = trained(warm_python, tmp_path, free_port, "alone")
    assert run.meta["ranks"] == {"world": 2, "merged_steps": 3, "apart_steps": 0, "backend": "gloo"}
    assert run.events("ranks_apart").rows == 0
    table = run.tensors(columns=["ranks"])
    found = {step: set() for step in range(1, 7)}
    for step, rank, ranks in zip(*(table[name].tolist() for name in ("step", "rank", "ranks")), strict=True):
        found[step].add((rank, ranks == 2))
    assert found == {step: {(0, True)} if step <= 3 else {(0, False), (1, False)} for step in range(1, 7)}
    mean = [sum(each) / 2 for each in zip(*losses, strict=True)]
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(mean[:3] + losses[0][3:], rel=1e-6)


def test_a_rank_that_makes_no_step_is_not_waited_for(warm_python, tmp_path, free_port):
    run, losses = trained(warm_python, tmp_path, free_port, "apart")  # a thread of rank 0 waits to the end for it
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(losses[0], rel=1e-6)


def test_a_rank_that_is_done_earlier_waits_for_the_store_to_be_gone(monkeypatch, free_port):
    here = dist.TCPStore("127.0.0.1", free_port, 1, is_master=True)
    shared = dist.PrefixStore("a", dist.TCPStore("127.0.0.1", free_port, 1, is_master=False))
    monkeypatch.setattr("narrowgauge.session.ranks.old_store.programs_own", lambda: Met(shared, 1, 2))
    old = OldStore()
    old.wait()  # there was none
    old.part()
    waiting = threading.Thread(target=old.wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    del here
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("words", ["by its address", "by a store", "by a store in its place"])
def test_a_store_that_the_program_holds_is_no_old_one(words, free_port):
    told, seams = [], Seams()
    store = dist.HashStore()
    groups.follow(seams, lambda failed: told.append("part"), lambda: told.append("meet"))
    try:
        if words == "by its address":
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{free_port}", world_size=1, rank=0)
        elif words == "by a store":
            dist.init_process_group("gloo", store=store, world_size=1, rank=0)
        else:
            dist.init_process_group("gloo", None, None, 1, 0, store)
        dist.destroy_process_group()
    finally:
        seams.close()
    assert told == [*["meet"] * (words == "by its address"), "part"]
