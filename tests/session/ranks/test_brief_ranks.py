"""Brief rows of programs of several ranks: two processes over gloo, beside the same with a whole row of each step."""

import json

import numpy as np
import pytest
from tests.ports import free_port
from tests.session.ranks.pairs import started

from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store import open_run

PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from narrowgauge.session.ranks import Ranks, flights, ranks
from narrowgauge.session.steps import pace, rows

dist.init_process_group("gloo")
rank, (kind, *words) = dist.get_rank(), sys.argv[1].split()
pace.SETTLED, pace.SHORT = 4, 0.0 if f"long{rank}" in words else 1e9
if "soon" in words:
    rows.TOGETHER = 1  # times are known as steps end
if "apart" in words:
    ranks.MOST_BYTES = 1  # no step is merged
said, decided, taken, heard, number = [], [], [], [], 0

def resolve(self, patience, original=Ranks._resolve):
    decided.append([self._together.open[0].step, number, stepping])
    original(self, patience)

def take(self, *args, original=flights.Waiting.take):
    table = original(self, *args)
    taken.append(int(max(table[:, 0])))
    return table

class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        heard.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))

Ranks._resolve, flights.Waiting.take = resolve, take

def batch(number, rank):
    return torch.randn(4 + number % 3, 16, generator=torch.Generator().manual_seed(2 * number + rank))

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
if kind == "stages":
    model = model[:2] if rank == 0 else model[2:]
elif kind == "ddp":
    model = DistributedDataParallel(model)
elif kind == "fsdp":
    fully_shard(model[0]), fully_shard(model[2]), fully_shard(model)
parameters = list(model.parameters())
groups = [parameters[:2], parameters[2:]] if "two" in words else [parameters]
optimizers = [torch.optim.SGD(group, lr=0.01) for group in groups]
last = 24 if rank == 0 and "uneven" in words else 27
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=6, enabled="scaled" in words)

def of_a_stage(x):
    y = model(x) if rank == 0 else torch.zeros(len(x), 32)
    y = y if rank == 0 else y.requires_grad_()
    dist.broadcast(y.data, 0)
    loss = None if rank == 0 else F.mse_loss(model(y), x)
    if loss is not None:
        loss.backward()
        said.append(loss.item())
    dy = torch.zeros_like(y) if rank == 0 else y.grad
    dist.broadcast(dy, 1)
    if rank == 0:
        y.backward(dy)

if "mode" in words:
    Functions().__enter__()
for number in range(1, last + 1):
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.01 / number
    x = batch(number, 0 if kind == "stages" else rank)
    if kind == "stages":
        of_a_stage(x)
    else:
        times = 2 if number == 14 and rank == 1 and "thrown" in words else 1
        for _ in range(times):
            model.zero_grad()
            loss = F.mse_loss(model(x), x)
            spiked, overflows = (number == 14 and rank == 1 and word in words for word in ("spike", "overflow"))
            scaler.scale(loss + float("inf") if spiked else loss * float("inf") if overflows else loss).backward()
        said.append(loss.item())
    if "clips" in words:  # so the norm of long steps is known, too
        nn.utils.clip_grad_norm_(parameters, 0.5)
    for stepping, optimizer in enumerate(optimizers):
        scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    if (rank == 0 and "judged0" in words or "judged" in words) and number in (5, 10, 12, last):
        with torch.no_grad():
            F.mse_loss(model(batch(100, rank)), batch(100, rank)).item()
    if kind == "local" and number <= (14 if "gone" in words else 24):
        dist.barrier()
    if "gone" in words and number == 14 and rank == 1:
        os.kill(os.getpid(), 9)
print(json.dumps([said, decided, taken, heard]), flush=True)
if "uneven" not in words and "gone" not in words:
    dist.barrier()
    dist.destroy_process_group()
"""
LAST = 27
EACH = list(range(1, LAST + 1))
BETWEEN = [at for at in EACH if at not in (1, 2, 10, 20)]
IN_BRIEF = {"loss", "lr", "step_seconds", "clean", "nonfinite"}
SAME = "loss", "lr", "grad_norm", "tokens", "microbatches", "param_norm", "update_ratio", "eval_loss", "nonfinite"


@pytest.fixture
def ran(warm_python, tmp_path):
    """What ranks said, and their run, by the program's words and `watch.scalars`."""

    def run(words, scalars, codes=(0, 0)):
        folder = tmp_path / scalars
        ranks = started(warm_python, folder, free_port(), PROGRAM, words, every=10, scalars=scalars)
        assert [rank.wait(120) for rank in ranks] == list(codes), (folder / "said1").read_text()
        texts = [(folder / f"said{rank}").read_text() for rank in range(2)]
        return [json.loads(text) if text else None for text in texts], open_run(folder / "out")

    return run


def columns(run, rank=0):
    """Each scalar's numbers by step; of what a step has none of, nothing."""
    table = run.scalars(rank=rank)
    names = [name for name in table.columns if name != "step"]
    return {
        name: {
            at: value for at, value in zip(table["step"].tolist(), table[name].tolist(), strict=True) if value == value
        }
        for name in names
    }


def names_at(found, step):
    return {name for name, values in found.items() if step in values}


def check(run, every, brief=BETWEEN):
    """All that brief rows, and whole ones around recorded steps, have is as with a whole row of each step."""
    found, wanted = columns(run), columns(every)
    for name in SAME:
        there = found.get(name, {})
        assert there == {at: wanted[name][at] for at in there}, name
        if name in IN_BRIEF:
            assert set(there) == set(wanted[name]), name
        else:  # nor does anything lack
            assert set(there) == set(wanted.get(name, {})) - (set() if name == "eval_loss" else set(brief)), name
    for at in brief:
        assert names_at(found, at) - {"eval_loss"} == IN_BRIEF, at
    assert [at for at in EACH if at not in found["microbatches"]] == list(brief)
    for facts in (run.meta, every.meta):
        assert (facts["ranks"]["merged_steps"], facts["ranks"]["apart_steps"]) == (2, 0)
        assert [note for note in facts["notes"] if "watch.scalars" not in note] == []
    one, other = run.tensors(), every.tensors()
    assert one.columns == other.columns
    for name in one.columns:
        if name != "wall_time":
            assert [str(x) for x in one[name]] == [str(x) for x in other[name]], name
    assert set(one["ranks"].tolist()) <= {1, 2}
    assert manifests.ranks(run.path) == manifests.ranks(every.path)
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "ddp two"])
def test_between_recorded_steps_rows_of_all_ranks_are_brief(ran, kind):
    said, every = ran(kind, "all")
    again, run = ran(kind, "loss")
    assert again[0][0] == said[0][0]
    assert again[0][1] == again[1][1] == said[0][1] == [[10, 13, 0], [20, 23, 0]]  # in steps that are left alone
    found = check(run, every)
    # Of the first recorded step there are names that nobody had before; all that was finished goes with the second one.
    last = 21 if "two" in kind else 22  # whose first optimizer comes by before the step is finished
    assert [taken for _, _, taken, _ in said] == [[9, 22]] * 2
    assert [taken for _, _, taken, _ in again] == [[9, last]] * 2
    mean = np.mean([each[0] for each in said], 0)
    assert found["loss"] == pytest.approx(dict(zip(EACH, mean.tolist(), strict=True)), rel=1e-6)
    assert {"grad_norm", "tokens", "data_digest"} <= names_at(found, 10)
    assert run.meta["watch"]["steps_in_brief"] == len(BETWEEN)
    assert "steps_in_brief" not in every.meta["watch"]


def test_under_a_gradient_scaler_they_have_its_scale_and_what_it_skipped(ran):
    _, every = ran("ddp scaled overflow", "all")
    _, run = ran("ddp scaled overflow", "loss")
    found, wanted = columns(run), columns(every)
    assert list(found["loss_scale"]) == EACH
    for name in ("loss", "loss_scale", "skipped", "lr"):
        assert found[name] == wanted[name], name
    assert found["skipped"] == {14: 1.0}
    assert {"loss_scale"} == names_at(found, 13) - IN_BRIEF


def test_modes_of_the_program_see_nothing_of_what_is_merged_meanwhile(ran):
    said, _ = ran("ddp mode", "all")
    again, _ = ran("ddp mode", "loss")
    assert [heard for *_, heard in again] == [heard for *_, heard in said]
    assert said[0][3]


@pytest.mark.parametrize("words", ["ddp soon clips", "ddp soon clips long1", "ddp soon clips long0"])
def test_by_themselves_they_are_so_where_steps_of_all_ranks_are_short(ran, words):
    _, every = ran(words, "all")
    _, run = ran(words, "auto")
    check(run, every, [at for at in BETWEEN if at > 13] if "long" not in words else [])


def test_where_ranks_have_given_up_to_merge_each_goes_by_its_own_steps(ran):
    said, run = ran("ddp soon long1 apart", "auto")
    alone = [at for at in BETWEEN if at > 11]
    for rank, brief in ((0, alone), (1, [])):
        found = columns(run, rank)
        assert found["loss"] == pytest.approx(dict(zip(EACH, said[rank][0], strict=True)), rel=1e-6)
        assert {at for at in found["loss"] if at > 11} - set(found["microbatches"]) == set(brief)
    assert run.meta["ranks"]["merged_steps"] == 0


def test_a_whole_row_of_some_ranks_beside_brief_ones_tells_nothing_of_all(ran):
    """Stages: the first, which has no loss, has a whole row of each step, and is rank 0."""
    said, every = ran("stages", "all")
    again, run = ran("stages", "loss")
    assert again[1][0] == said[1][0]
    found = check(run, every)
    assert list(found["loss"].values()) == pytest.approx(said[1][0], rel=1e-6)
    assert run.meta["watch"]["steps_in_brief"] == len(BETWEEN)
    assert run.meta["notes"] == [
        'watch.scalars is "loss", but backward is called on no number, or on what is '
        "thrown away: each step has a whole row on this rank; the run's are brief where another rank's are."
    ]


def test_by_themselves_ranks_have_whole_rows_where_one_of_them_must(ran):
    _, every = ran("stages soon clips", "all")
    _, run = ran("stages soon clips", "auto")
    check(run, every, [])


def test_norms_of_long_steps_that_nobody_clips_are_those_of_the_first_and_recorded_ones(ran):
    _, every = ran("fsdp soon long0 long1", "all")
    _, run = ran("fsdp soon long0 long1", "auto")
    found, wanted = columns(run), columns(every)
    assert list(found["grad_norm"]) == [1, 2, 3, 4, 10, 20]
    assert found["grad_norm"] == {at: wanted["grad_norm"][at] for at in found["grad_norm"]}
    assert found["tokens" if "tokens" in wanted else "microbatches"].keys() == set(EACH)


@pytest.mark.parametrize("words", ["ddp judged", "ddp judged0", "local judged"])
def test_evaluations_of_brief_steps_are_those_of_all_ranks(ran, words):
    said, every = ran(words, "all")
    again, run = ran(words, "loss")
    found = check(run, every)
    for ranks in (said, again):  # step 13 is not as the one before, and ranks decide behind it all the same
        assert [decided for _, decided, *_ in ranks] == [[[10, 13, 0], [20, 23, 0]]] * 2
    assert sorted(found["eval_loss"]) == [5, 10, 12, LAST]


def test_a_loss_that_is_not_finite_on_one_rank(ran):
    _, every = ran("local spike", "all")
    _, run = ran("local spike", "loss")
    found, wanted = columns(run), columns(every)
    assert {at for at, value in found["nonfinite"].items() if value} == {14}
    assert found["loss"] == wanted["loss"]
    assert found["loss"][14] == np.inf
    assert names_at(found, 15) == IN_BRIEF  # rank 1 has a whole row of it
    assert run.meta["ranks"]["merged_steps"] == 2


def test_a_loss_that_one_rank_does_not_know_is_no_mean_of_the_others(ran):
    _, every = ran("local thrown", "all")
    _, run = ran("local thrown", "loss")
    found, wanted = columns(run), columns(every)
    assert [at for at in EACH if at not in found["loss"]] == [14]
    assert found["loss"] == {at: wanted["loss"][at] for at in found["loss"]}


def test_a_rank_that_ends_earlier(ran):
    said, every = ran("local uneven", "all")
    _, run = ran("local uneven", "loss")
    found, wanted = columns(run), columns(every)
    assert list(found["loss"]) == EACH
    assert found["loss"] == wanted["loss"]
    assert [found["loss"][at] for at in EACH[-3:]] == pytest.approx(said[1][0][-3:], rel=1e-6)
    assert run.meta["ranks"] == every.meta["ranks"]
    assert run.meta["notes"] == every.meta["notes"]


def test_a_rank_that_is_killed_in_a_brief_step_is_not_waited_for(ran):
    said, run = ran("local gone", "loss", codes=(0, -9))
    found = columns(run)
    assert list(found["loss"]) == EACH
    assert len(said[0][0]) == LAST
    assert run.status == "killed"
