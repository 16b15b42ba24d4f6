"""Ranks as one, all of them in this process: what is merged, by how many collectives, and what without a rank."""

import json
import time
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

import narrowgauge as ng
from narrowgauge.metrics import MOMENTS, OPERAND_COLUMNS, finalize
from narrowgauge.metrics.merge import merge as oracle
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.stats.moments import moments
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.session.plan import Plan
from narrowgauge.session.ranks import Ranks, Told, flights, group, last_words, patience, ranks, together
from narrowgauge.session.ranks.agreement import LAG
from narrowgauge.session.ranks.meeting import Met

DONE = ("store", "rank", "world")


class Counting(dist.ProcessGroupGloo):
    """Counts the collectives that are started."""

    started: ClassVar[list[str]] = []

    def gather(self, *args):
        self.started.append("gather")
        return super().gather(*args)


for name in (
    "allgather",
    "allreduce",
    "broadcast",
    "reduce",
    "barrier",
    "alltoall",
    "scatter",
    "reduce_scatter",
    "send",
):
    setattr(Counting, name, lambda self, *args, name=name: Counting.started.append(name))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(Counting, "started", [])
    monkeypatch.setattr(dist, "ProcessGroupGloo", Counting)
    monkeypatch.setattr(ranks, "PATIENCE", 0.3)
    monkeypatch.setattr(ranks, "may_come", lambda folder, rank: False)  # all are of this process, which lives
    monkeypatch.setattr(group, "MEETING", 5.0)


class Clock:
    """Time passes only where somebody sleeps."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Rank:
    """One rank of a program that has `steps` steps and records `every` so many."""

    def __init__(self, folder, store, rank, world, every=1, copies=None, meshes=None, **watch):
        plan = Plan("asis", str(folder), ("train.py",), every=every, watch=watch)
        self.writer = RunWriter(folder, {}, rank=rank)
        self.collector = Collector(self.writer, every=every)
        said = copies or {}
        self.models, self.dear, self.short = 1, False, False
        flags = {"dear": lambda: self.dear, "short": lambda: self.short}
        told = Told(said.get, (meshes or {}).get, models=lambda: self.models, **flags)
        self.ranks = Ranks(plan, self.writer, self.collector, told, meet=lambda: Met(store, rank, world))
        self.step = 0

    def begin(self):
        self.step += 1
        self.ranks.tick(self.step)
        return self.collector.begin_step(self.step)

    def see(self, site, x, q=None):
        module, role = site.split(":")
        self.collector.operand(module, role, x, q or ng.quantize(x, ng.formats.E4M3FN))

    def end(self, **scalars):
        self.collector.end_step()
        if scalars:
            self.ranks.add_scalars(self.step, **scalars)

    def finish(self):
        self.ranks.finish()
        self.collector.flush()
        self.writer.update_meta(**self.ranks.facts(), notes=self.ranks.notes)
        self.writer.close()


def made(tmp_path, world=2, store=None, **options):
    """The ranks of one program; the rooms of their options may differ by rank."""
    store = store or dist.HashStore()
    return [
        Rank(tmp_path / "run", store, r, world, **{k: v[r] if isinstance(v, list) else v for k, v in options.items()})
        for r in range(world)
    ]


def finished(program, tmp_path):
    import threading

    threads = [threading.Thread(target=rank.finish) for rank in program]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return open_run(tmp_path / "run")


def train(program, steps, tensors):
    """`tensors(rank, step)` is what each rank shows, by site."""
    for _ in range(steps):
        for r, rank in enumerate(program):
            if rank.begin():
                for site, x in tensors(r, rank.step).items():
                    rank.see(site, x)
            rank.end(loss=float(rank.step + r), tokens=10.0)


def batch(rank, step, rows=8):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(100 * step + rank)) * (1 + rank)


def row(run, site, step, rank=0):
    table = run.tensors(sites=[site], steps=[step])
    index = table["rank"].tolist().index(rank)
    return {name: table[name][index] for name in table.columns}


def events(run, kind):
    table = run.events(kind)
    return [
        {"step": s, "rank": r, "site": w, "message": m, **json.loads(d)}
        for s, r, w, m, d in zip(*(table[c] for c in ("step", "rank", "site", "message", "data")), strict=True)
    ]


def test_parts_are_merged_by_each_metrics_law(tmp_path):
    program = made(tmp_path, world=3, every=2)
    train(program, 6, lambda rank, step: {"a:input": batch(rank, step, rows=8 + rank)})
    run = finished(program, tmp_path)
    assert run.ranks == (0,)
    assert sorted(set(run.tensors()["step"].tolist())) == [2, 4, 6]
    for step in (2, 4, 6):
        whole = torch.cat([batch(rank, step, rows=8 + rank) for rank in range(3)])
        found = row(run, "a:input", step)
        assert (found["numel"], found["ranks"]) == (whole.numel(), 3)
        assert found["amax"] == whole.abs().max().item()
        assert found["std"] == pytest.approx(whole.double().std(correction=0).item(), rel=1e-6)
        each = [batch(rank, step, rows=8 + rank) for rank in range(3)]
        packed = np.stack([moments(x, ng.quantize(x, ng.formats.E4M3FN)).numpy() for x in each])
        want = finalize(oracle(packed)[None])
        for column in OPERAND_COLUMNS:
            assert np.allclose(found[column], want[column][0], rtol=1e-12, equal_nan=True), column
    assert run.meta["ranks"] == {"world": 3, "merged_steps": 3, "apart_steps": 0, "backend": "gloo"}


def test_one_watch_after_another_of_the_same_ranks_merges_its_own(tmp_path):
    store = dist.HashStore()
    for turn in (1, 2):
        folder = tmp_path / str(turn)
        program = made(folder, store=store)
        train(program, 2, lambda rank, step, turn=turn: {"a:input": turn * batch(rank, step)})
        run = finished(program, folder)
        assert run.meta["ranks"] == {"world": 2, "merged_steps": 2, "apart_steps": 0, "backend": "gloo"}
        want = max((turn * batch(rank, 2)).abs().max().item() for rank in (0, 1))
        assert row(run, "a:input", 2)["amax"] == want


@pytest.mark.parametrize("gone", [0, 1])
def test_ranks_that_are_started_again_merge_over_the_store_of_those_that_died(tmp_path, monkeypatch, gone):
    store = dist.HashStore()  # torchrun's own outlives the ranks
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    for again in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", again)
        folder = tmp_path / again
        program = made(folder, store=store)
        if again == "0":  # one dies before it has told anything
            survivor = program[1 - gone]
            train([survivor], 3, lambda rank, step: {"a:input": batch(rank, step)})
            program[gone].ranks.forget()
            program[gone].writer.close("failed")
            survivor.finish()
            continue
        train(program, 8, lambda rank, step: {"a:input": batch(rank, step)})
        run = finished(program, folder)
        assert run.meta["ranks"] == {"world": 2, "merged_steps": 8, "apart_steps": 0, "backend": "gloo"}


def test_ranks_of_several_launchers_merge_though_these_count_their_starts_otherwise(tmp_path, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    program = made(tmp_path, store=store)
    for rank, again in zip(program, ("1", "0"), strict=True):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", again)
        train([rank], 1, lambda _, step: {"a:input": batch(0, step)})
    train(program, 3, lambda rank, step: {"a:input": batch(rank, step)})
    assert finished(program, tmp_path).meta["ranks"]["merged_steps"] == 4


def test_two_thousand_sites_on_two_ranks_take_one_collective_a_step(tmp_path):
    program = made(tmp_path)
    vector = moments(batch(0, 1), ng.quantize(batch(0, 1), ng.formats.E4M3FN))
    for _ in range(3):
        for rank in program:
            rank.begin()
            for i in range(2000):
                rank.collector.operand(f"layers.{i}", "input", batch(0, 1), None, moments=vector)
            rank.end(loss=1.0)
    run = finished(program, tmp_path)
    assert Counting.started == ["gather"] * 3 * 2  # each once on either rank
    table = run.tensors(["numel"], steps=[2])
    assert (table.rows, set(table["numel"].tolist())) == (2000, {2 * 256})


def test_copies_are_taken_once_and_weights_that_are_alike_are_copies(tmp_path):
    w, shards = batch(7, 7), [batch(1, 1), batch(2, 1)]
    shown = lambda rank, step: {"ddp:weight": w, "unknown:weight": w, "sharded:weight": shards[rank], "tp:input": w}  # noqa: E731
    program = made(tmp_path, copies={"ddp:weight": 0, "tp:input": 0})
    train(program, 2, shown)
    run = finished(program, tmp_path)
    numel = {site: row(run, site, 2)["numel"] for site in run.sites}
    n = w.numel()
    assert numel == {"ddp:weight": n, "unknown:weight": n, "sharded:weight": 2 * n, "tp:input": n}
    assert not events(run, "replicas_disagree")


def test_copies_of_parts_are_told_apart(tmp_path):
    """Two ranks hold either half of a weight: a 2 x 2 mesh."""
    halves = [batch(1, 1), batch(2, 1)]
    program = made(tmp_path, world=4, copies=[{"w:weight": rank % 2} for rank in range(4)])
    train(program, 1, lambda rank, step: {"w:weight": halves[rank % 2]})
    run = finished(program, tmp_path)
    assert row(run, "w:weight", 1)["numel"] == torch.cat(halves).numel()


@pytest.mark.parametrize("unlike", [True, False])
def test_weights_of_two_meshes_are_copies_where_they_are_alike_and_those_of_one_mesh_are_what_it_says(tmp_path, unlike):
    """Ranks 0 1 / 2 3 cut the same layer, each pair over a mesh of its own; its parts may be alike, being zeros."""
    w = torch.zeros(8, 32)
    halves = [w + (1 + who) if unlike else w for who in range(2)]
    program = made(tmp_path, world=4, meshes=[{"w:weight": rank - rank % 2} for rank in range(4)])
    train(program, 2, lambda rank, step: {"w:weight": halves[rank % 2] + (step == 2) * 10 * rank})
    run = finished(program, tmp_path)
    assert row(run, "w:weight", 1)["numel"] == 2 * w.numel()
    assert row(run, "w:weight", 2)["numel"] == 4 * w.numel()
    assert events(run, "replicas_disagree") == []  # nothing says that they have to be alike


def test_ranks_that_are_fed_the_same_hold_copies_where_nothing_is_said_of_them(tmp_path):
    """Ranks 0 1 / 2 3 are two tensor-parallel pairs, which happen to be given equal batches."""
    copies = [{"cut:input": rank - rank % 2} for rank in range(4)]
    program = made(tmp_path, world=4, copies=copies)
    whole = batch(1, 1)

    def shown(rank, step):
        return {"cut:input": whole, "whole:input": whole, "rows:input": batch(rank, step), "whole:grad_output": whole}

    train(program, 1, shown)
    run = finished(program, tmp_path)
    numel = {site: row(run, site, 1)["numel"] // whole.numel() for site in run.sites}
    assert numel == {"cut:input": 2, "whole:input": 2, "rows:input": 4, "whole:grad_output": 2}


def test_copies_that_disagree_leave_one_event_until_they_agree_again(tmp_path):
    def shown(rank, step):
        w = batch(7, 7)
        drifted = w * 1.001 if rank == 1 and step in (2, 3, 5) else w
        return {"ddp:weight": drifted, "unknown:weight": drifted, "own:input": drifted}

    program = made(tmp_path, copies={"ddp:weight": 0})
    train(program, 6, shown)
    found = events(finished(program, tmp_path), "replicas_disagree")
    assert sorted((each["site"], each["step"]) for each in found) == [
        ("ddp:weight", 2), ("ddp:weight", 5), ("unknown:weight", 2), ("unknown:weight", 5),
    ]  # fmt: skip
    first = next(each for each in found if each["site"] == "ddp:weight")
    assert first["ranks"] == [0, 1]
    values = first["values"]
    assert values["0"]["amax"] == batch(7, 7).abs().max().item()
    assert values["1"]["amax"] == (batch(7, 7) * 1.001).abs().max().item()
    assert first["message"] == "ddp:weight should be the same on ranks 0, 1 and is not, first at step 2"


@pytest.mark.parametrize("constant", [0.0, 0.1, float("inf")])
def test_weights_that_begin_as_a_constant_are_not_held_to_be_copies(tmp_path, constant):
    """LoRA's B, say: of ranks whose layers are copies, and of ranks whose layers only have the same name."""

    def shown(rank, step):
        begun = step > 1
        copied = batch(7, step) if begun else torch.full((8, 32), constant)
        drifted = copied * 1.001 if rank == 1 and step == 4 else copied
        return {"copied:weight": drifted, "other:weight": batch(rank, step) if begun else copied}

    program = made(tmp_path)
    train(program, 4, shown)
    run = finished(program, tmp_path)
    assert [(each["site"], each["step"]) for each in events(run, "replicas_disagree")] == [("copied:weight", 4)]
    numel = {site: [row(run, site, step)["numel"] for step in (1, 2)] for site in run.sites}
    assert numel == {"copied:weight": [256, 256], "other:weight": [256, 512]}


def test_a_model_with_the_names_of_the_last_one_is_not_held_to_what_that_was(tmp_path):
    program = made(tmp_path)

    def shown(rank, step):
        for each in program:
            each.models = 1 if step <= 2 else 2
        return {"0:weight": batch(7 if step <= 2 else rank, 1), "tied:weight": batch(7, 1)}

    train(program, 4, shown)
    run = finished(program, tmp_path)
    numel = [row(run, "0:weight", step)["numel"] for step in (1, 2, 3, 4)]
    assert numel == [256, 256, 512, 512]  # the first model's are copies, the second's are parts
    assert events(run, "replicas_disagree") == []


def test_ranks_with_other_sites_are_united_by_name(tmp_path):
    program = made(tmp_path)
    sites = [["stage0:input", "both:input"], ["both:input", "stage1:input"]]
    train(program, 2, lambda rank, step: {site: batch(rank, step) for site in sites[rank]})
    run = finished(program, tmp_path)
    assert run.sites == ("both:input", "stage0:input", "stage1:input")
    found = {site: (row(run, site, 2)["numel"], row(run, site, 2)["ranks"]) for site in run.sites}
    assert found == {"both:input": (512, 2), "stage0:input": (256, 1), "stage1:input": (256, 1)}
    assert row(run, "stage1:input", 2)["amax"] == batch(1, 2).abs().max().item()


def test_a_rank_without_a_site_does_not_keep_the_others_apart(tmp_path):
    program = made(tmp_path)
    train(program, 2, lambda rank, step: {} if rank else {"a:input": batch(rank, step)})
    run = finished(program, tmp_path)
    assert run.meta["ranks"]["merged_steps"] == 2
    assert row(run, "a:input", 2)["numel"] == 256


def test_scalars_are_those_of_all_ranks(tmp_path):
    program = made(tmp_path, every=3)
    train(program, 10, lambda rank, step: {"a:input": batch(rank, step)})
    run = finished(program, tmp_path)
    scalars = run.scalars()
    assert scalars["step"].tolist() == list(range(1, 11))
    assert scalars["loss"].tolist() == [step + 0.5 for step in range(1, 11)]
    assert set(scalars["tokens"].tolist()) == {20.0}
    assert run.ranks == (0,)


def test_a_nan_of_one_rank_is_what_the_run_has_of_all(tmp_path):
    """Rank 0's own number, which its merged row supersedes, was finite."""
    program = made(tmp_path)
    for step in (1, 2, 3):
        for r, rank in enumerate(program):
            if rank.begin():
                rank.see("a:input", batch(r, step))
            rank.end(loss=float("nan") if r == 1 and step == 2 else float(r))
    loss = finished(program, tmp_path).scalars("loss")["loss"]
    assert np.array_equal(loss, [0.5, float("nan"), 0.5], equal_nan=True)


def test_a_learning_rate_of_one_group_that_differs_is_told(tmp_path):
    program = made(tmp_path)
    for step in (1, 2, 3):
        for r, rank in enumerate(program):
            if rank.begin():
                rank.see("a:input", batch(r, step))
            rank.end(lr=0.1, lr_0=0.1, lr_1=0.01 * (1 + r * (step > 1)))
    run = finished(program, tmp_path)
    assert run.scalars("lr_1")["lr_1"].tolist() == [0.01] * 3  # rank 0's
    assert [(each["step"], each["values"]) for each in events(run, "replicas_disagree")] == [
        (2, {"0": 0.01, "1": 0.02})
    ]


def test_steps_that_another_rank_made_alone_are_in_the_run(tmp_path):
    """Rank 0 has less data, and is done; rank 1 goes on."""
    _, second = program = made(tmp_path, every=4)
    train(program, 5, lambda rank, step: {"a:input": batch(rank, step)})
    for step in (6, 7):
        second.begin()
        second.end(loss=float(step), tokens=10.0)
    scalars = finished(program, tmp_path).scalars(["loss", "tokens"])
    assert scalars["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert scalars["loss"].tolist() == [1.5, 2.5, 3.5, 4.5, 5.5, 6.0, 7.0]
    assert scalars["tokens"].tolist() == [20.0] * 5 + [10.0] * 2


def test_a_late_rank_is_left_behind_and_merged_again_when_it_is_back(tmp_path):
    first, second = program = made(tmp_path)

    def go(rank, r, steps):
        for _ in range(steps):
            rank.begin()
            rank.see("a:input", batch(r, rank.step))
            rank.end(loss=1.0)

    go(first, 0, 2 + LAG)  # decides its steps 1 and 2 alone: nobody waits
    go(second, 1, 2 + LAG)  # finds them decided
    for _ in range(3):
        go(first, 0, 1)
        go(second, 1, 1)
    run = finished(program, tmp_path)
    table = run.tensors(["numel"])
    found = sorted(zip(table["step"].tolist(), table["rank"].tolist(), table["numel"].tolist(), strict=True))
    apart = [
        (1, 0, 256),
        (1, 1, 256),
    ]
    assert [each for each in found if each[0] == 1] == apart
    assert [each for each in found if each[0] > 2] == [(step, 0, 512) for step in range(3, 6 + LAG)]
    told = events(run, "ranks_apart")
    assert [(each["step"], each["rank"], each["missing"]) for each in told] == [(1, 0, [1])]
    assert (
        told[0]["message"] == "step 1 is not merged over the ranks: rank 1 had not recorded it; each wrote its own rows"
    )


def test_all_ranks_begin_at_one_step_with_what_one_of_them_finds_worth_compiling(tmp_path):
    program, began = made(tmp_path, every=2), [[], []]
    for _ in range(16):
        for r, rank in enumerate(program):
            rank.dear = r == 1 and rank.step >= 3  # from its recorded step 4 on
            if rank.begin():
                rank.see("a:input", batch(r, rank.step))
            began[r].append(rank.ranks.dear)
            rank.end(loss=1.0)
    finished(program, tmp_path)
    assert began[0] == began[1] == [step >= 4 + LAG for step in range(1, 17)]


def test_steps_are_short_where_all_say_so_and_ranks_know_it_at_the_same_step(tmp_path):
    program, said = made(tmp_path, every=2), [[], []]
    for _ in range(20):
        for r, rank in enumerate(program):
            rank.short = r == 0 or 3 <= rank.step < 11  # of rank 1 from its recorded step 4 on, to step 10
            if rank.begin() and not (r == 1 and rank.step == 8):  # of which it tells nothing: nothing is decided
                rank.see("a:input", batch(r, rank.step))
            said[r].append(rank.ranks.short)
            rank.end(loss=1.0)
    assert all(rank.ranks.merging for rank in program)
    finished(program, tmp_path)
    assert said[0] == said[1] == [4 + LAG <= step < 12 + LAG for step in range(1, 21)]


def test_rank_0_s_own_row_is_there_before_anybody_may_merge_it(tmp_path, monkeypatch):
    rank = made(tmp_path)[0]
    told, order = rank.ranks, []
    monkeypatch.setattr(rank.writer, "add_scalars", lambda step, **values: order.append("own"))
    monkeypatch.setattr(told._waiting, "add", lambda step, row: order.append("waits"))
    told.add_scalars(1, loss=1.0)
    assert order == ["own", "waits"]
    finished([rank], tmp_path)


def test_a_rank_that_is_gone_keeps_nobody(tmp_path):
    first, second = program = made(tmp_path)
    train(program, 3, lambda rank, step: {"a:input": batch(rank, step)})
    second.ranks.forget()  # it is killed
    began = time.monotonic()
    train([first], 8, lambda rank, step: {"a:input": batch(rank, step)})
    first.finish()
    assert time.monotonic() - began < 20
    second.writer.close("failed")
    run = open_run(tmp_path / "run")
    assert sorted(set(run.tensors()["step"].tolist())) == list(range(1, 12))
    assert run.scalars("loss")["step"].tolist() == list(range(1, 12))
    assert [each["missing"] for each in events(run, "ranks_apart") if "missing" in each][-1] == [1]


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("ends", [0, 1])
def test_a_rank_that_an_error_ends_hardly_waits_for_one_that_waits_for_its_end(tmp_path, monkeypatch, ends, failed):
    clock = Clock()
    for module in (patience, flights, last_words):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(ranks, "PATIENCE", 20.0)
    monkeypatch.setattr(ranks, "HURRY", 1.0)
    program = made(tmp_path)
    train(program, 8, lambda rank, step: {"a:input": batch(rank, step)})
    while any(rank.ranks._together._flights.group.meeting for rank in program):  # which takes threads of theirs
        time.sleep(0.01)
    program[ends].ranks.finish(failed=failed)  # the other is in a collective of the program, and comes by no more
    assert clock.now < 4.0 if failed else clock.now > 20.0
    for rank in program:
        rank.finish()
    table = open_run(tmp_path / "run").tensors(["numel"])
    found = set(zip(table["step"].tolist(), table["rank"].tolist(), strict=True))
    assert {step for step, _ in found} == set(range(1, 9))
    assert (8, ends) in found


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_rank_that_is_gone_between_its_promise_and_the_gather(tmp_path, monkeypatch, comes_back):
    monkeypatch.setattr(together, "BEAT", 0.02)
    monkeypatch.setattr(together, "GONE", 0.2)
    aborted = []
    monkeypatch.setattr(group.Group, "abort", lambda self: aborted.append(self._rank))
    first, second = program = made(tmp_path)
    shown = lambda rank, step: {"a:input": batch(rank, step)}  # noqa: E731
    train(program, 3, shown)  # what all have told of is agreed
    second.ranks._together.stop()
    if not comes_back:
        second.ranks.forget()
    patience = time.monotonic() + 30
    while not first.ranks._off and time.monotonic() < patience:
        train([first], 1, shown)
        time.sleep(0.02)
    last = first.step
    assert first.ranks._off
    assert set(aborted) == {0}
    if comes_back:
        train([second], 6, lambda rank, step: shown(1, step))  # it was stopped, and joins no gather that is left
        run = finished(program, tmp_path)
        note = "Ranks are not merged, each records its own rows: RuntimeError: another rank has given up merging"
        assert second.ranks.notes == [note]
        assert [row(run, "a:input", step, rank=1)["numel"] for step in range(1, 10)] == [256] * 9
    else:
        first.finish()
        second.writer.close("failed")
        run = open_run(tmp_path / "run")
    assert [row(run, "a:input", step)["numel"] for step in range(1, last + 1)] == [256] * last
    told = [each for each in events(run, "ranks_apart") if "sign of life" in each["message"]]
    assert [(each["step"], each["rank"]) for each in told] == [(1, 0)]
    assert told[0]["message"].endswith("RuntimeError: rank 1 gave no sign of life for 0.2 s")


def test_a_gather_under_way_is_ended_once_another_rank_has_given_up(tmp_path, monkeypatch):
    """On a GPU it would run, and all would wait for it, until the program's end."""
    aborted, gather = [], group.Group.gather
    monkeypatch.setattr(group.Group, "abort", lambda self: aborted.append(self._rank))
    first, second = program = made(tmp_path)
    shown = lambda rank, step: {"a:input": batch(rank, step)}  # noqa: E731
    train(program, LAG, shown)
    for rank in program:
        rank.ranks._together._flights.group._meeting.join(30)
    failing = lambda self, table: 1 / 0 if self._rank else gather(self, table)  # noqa: E731
    monkeypatch.setattr(group.Group, "gather", failing)
    train(program, 3, shown)
    assert (first.ranks._off, second.ranks._off) == (True, True)
    assert 0 in aborted
    finished(program, tmp_path)


def test_what_was_aborted_is_done_and_not_merged(tmp_path, monkeypatch):
    """The thread that aborts a gather says so first: between two questions of the program's own thread it is over."""
    program = made(tmp_path)
    train(program, 1 + LAG, lambda rank, step: {"a:input": batch(rank, step)})
    first = program[0].ranks._together
    flights = first._flights
    flights.group._meeting.join(30)
    flights.launch(0.0)
    ((mine, gather, *_),) = flights._flying
    assert mine.step == 1
    deadline = time.monotonic() + 30
    while not gather.done() and time.monotonic() < deadline:  # an aborted one counts as done, and this one is
        time.sleep(0.01)
    monkeypatch.setattr(group.Group, "abort", lambda self: setattr(self, "aborted", True))  # as on a GPU
    flights.lose("rank 1 is gone")
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        first.land()
    flights.arrive(1.0)
    assert flights.merged == 0
    finished(program, tmp_path)


def test_a_store_that_is_gone_leaves_every_rank_its_own_rows(tmp_path, monkeypatch):
    program = made(tmp_path)
    train(program, 2, lambda rank, step: {"a:input": batch(rank, step)})

    def dead(*args):
        raise RuntimeError("Broken pipe")

    for rank in program:
        monkeypatch.setattr(
            rank.ranks._together._agreement._store,
            "store",
            type("Dead", (), dict.fromkeys(("set", "check", "add", "compare_set"), dead))(),
        )
    train(program, 6, lambda rank, step: {"a:input": batch(rank, step)})
    run = finished(program, tmp_path)
    table = run.tensors(["numel"])
    assert sorted(zip(table["step"].tolist(), table["rank"].tolist(), strict=True)) == [
        (s, r) for s in range(1, 9) for r in (0, 1)
    ]
    assert run.meta["notes"] == ["Ranks are not merged, each records its own rows: RuntimeError: Broken pipe"]
    assert run.scalars("loss", rank=1)["step"].tolist() == list(range(1, 9))


def test_a_backend_that_is_missing_is_told(tmp_path, monkeypatch):
    def missing(*args):
        raise RuntimeError("this torch has no gloo")

    monkeypatch.setattr(dist, "ProcessGroupGloo", missing)
    program = made(tmp_path)
    train(program, 1 + LAG, lambda rank, step: {"a:input": batch(rank, step)})
    run = finished(program, tmp_path)
    assert run.meta["notes"][0].endswith("RuntimeError: the ranks did not meet: this torch has no gloo")
    assert set(run.tensors()["rank"].tolist()) == {0, 1}


def test_each_ranks_own_rows_are_kept_on_request(tmp_path):
    program = made(tmp_path, ranks=True)
    train(program, 2, lambda rank, step: {"a:input": batch(rank, step)})
    run = finished(program, tmp_path)
    own = open_run(tmp_path / "run" / "ranks")
    assert (run.ranks, own.ranks) == ((0,), (0, 1))
    assert row(own, "a:input", 2, rank=1)["amax"] == batch(1, 2).abs().max().item()
    assert own.scalars("loss", rank=1)["loss"].tolist() == [2.0, 3.0]


def test_what_is_left_in_the_store_does_not_grow(tmp_path):
    store = dist.HashStore()
    program = [Rank(tmp_path / "run", store, r, 2) for r in range(2)]
    counts = []
    for _ in range(4):
        train(program, 8, lambda rank, step: {"a:input": batch(rank, step)})
        counts.append(store.num_keys())
    finished(program, tmp_path)
    assert counts[1] == counts[2] == counts[3]


def test_a_gather_holds_no_more_than_rank_0_can_take(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "MOST_BYTES", 1000)
    program = made(tmp_path)
    train(program, 1, lambda rank, step: {"a:input": batch(rank, step)})
    run = finished(program, tmp_path)
    assert "record fewer sites" in run.meta["notes"][0]
    assert set(run.tensors()["rank"].tolist()) == {0, 1}


def test_one_rank_alone_is_not_touched(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    collector = Collector(writer)
    alone = Ranks(Plan("asis", str(tmp_path), ()), writer, collector, Told())
    assert not alone.offer(1, [])
    assert alone.facts() == {}
    writer.close()


def test_the_width_of_a_row_is_the_layouts():
    assert MOMENTS.width == moments(batch(0, 0), ng.quantize(batch(0, 0), ng.formats.E4M3FN)).numel()
    assert group.PATIENCE.total_seconds() > 60  # a late rank is waited for on the device, not given up
