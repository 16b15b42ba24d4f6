"""What further recipes would do is merged over ranks as the run's own rows are, by the same collective."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.ranks import test_ranks
from tests.session.ranks.test_ranks import Counting, Rank, batch, events, finished, train
from tests.session.ranks.whole import MODEL, STEPS, by_hand, check_whole, rows
from tests.session.test_watch import PLAIN

import narrowgauge as ng
from narrowgauge.compute.recipes import by_name
from narrowgauge.metrics import OPERAND_COLUMNS, finalize
from narrowgauge.metrics.merge import merge as oracle
from narrowgauge.observe.report.readiness import readiness
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.stats.moments import moments
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.session.plan import Plan
from narrowgauge.session.ranks import Ranks, Told, ranks
from narrowgauge.session.ranks.agreement import LAG
from narrowgauge.session.ranks.meeting import Met

quick = test_ranks._quick
W = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Asked(Rank):
    """A rank of which another recipe asks in some steps."""

    def __init__(self, folder, store, rank, world, asks=lambda step: True, staged=False):
        super().__init__(folder, store, rank, world)
        self.asks = asks
        self.beside = RunWriter(folder / "what_if" / "rowwise", {}, rank=rank)
        self.further = Collector(self.beside)
        plan = Plan("asis", str(folder), ("train.py",), every=1)
        met, further = Met(store, rank, world), {"rowwise": self.further}
        told = Told({"w:weight": 0}.get, stages=lambda site: rank if staged else None)
        self.ranks = Ranks(plan, self.writer, self.collector, told, further, meet=lambda: met)

    def begin(self):
        recorded = super().begin()
        if self.asks(self.step):
            self.further.begin_step(self.step)
        return recorded

    def see(self, site, x):
        super().see(site, x)
        self.further.operand(*site.split(":"), x, by_rows(x))

    def end(self, **scalars):
        self.further.end_step()
        super().end(**scalars)

    def finish(self):
        super().finish()
        self.further.flush()
        self.beside.close()


def by_rows(x):
    rule = by_name("rowwise").uses("input")[0]
    return ng.quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling)


def made(tmp_path, world=2, **options):
    store = dist.HashStore()
    return [Asked(tmp_path / "run", store, r, world, **options) for r in range(world)]


def shown(rank, step):
    return {"a:input": batch(rank, step), "w:weight": W}


def test_rows_of_a_further_recipe_are_merged_by_each_metrics_law_and_by_no_collective_more(tmp_path):
    program = made(tmp_path, asks=lambda step: step != 2)
    train(program, 3, shown)
    own = finished(program, tmp_path)
    assert Counting.started == ["gather"] * 3 * 2
    beside = open_run(tmp_path / "run" / "what_if" / "rowwise")
    assert set(own.tensors()["step"].tolist()) == {1, 2, 3}
    assert set(beside.tensors()["step"].tolist()) == {1, 3}
    for run, quantized in ((own, lambda x: ng.quantize(x, ng.formats.E4M3FN)), (beside, by_rows)):
        assert (run.ranks, run.sites) == ((0,), ("a:input", "w:weight"))
        want = finalize(oracle(np.stack([moments(x, quantized(x)).numpy() for x in (batch(0, 3), batch(1, 3))]))[None])
        found = test_ranks.row(run, "a:input", 3)
        assert found["ranks"] == 2
        for column in OPERAND_COLUMNS:
            assert np.allclose(found[column], want[column][0], rtol=1e-12, equal_nan=True), column
        assert test_ranks.row(run, "w:weight", 3)["numel"] == W.numel()  # copies count once
    assert test_ranks.row(own, "a:input", 3)["sqnr_db"] < test_ranks.row(beside, "a:input", 3)["sqnr_db"]


def test_what_disagrees_is_told_once_and_not_by_each_recipe(tmp_path):
    program = made(tmp_path)
    train(program, 1, lambda rank, step: {"w:weight": W * (1 + rank)})
    run = finished(program, tmp_path)
    assert [each["site"] for each in events(run, "replicas_disagree")] == ["w:weight"]


def test_steps_that_are_not_merged_leave_each_ranks_own_rows_of_it(tmp_path):
    first, second = program = made(tmp_path)
    train([first], 2 + LAG, lambda rank, step: shown(0, step))
    train([second], 2 + LAG, lambda rank, step: shown(1, step))
    finished(program, tmp_path)
    table = open_run(tmp_path / "run" / "what_if" / "rowwise").tensors(sites=["a:input"], steps=[1])
    each = sorted(zip(*(table[name].tolist() for name in ("rank", "ranks", "numel")), strict=True))
    assert each == [(rank, 1, batch(rank, 1).numel()) for rank in (0, 1)]


def test_stages_that_number_their_own_layers_keep_apart_by_every_recipe(tmp_path):
    program = made(tmp_path, staged=True)
    train(program, 1, lambda rank, step: {"0:input": batch(rank, step)})
    own = finished(program, tmp_path)
    beside = open_run(tmp_path / "run" / "what_if" / "rowwise")
    assert own.sites == beside.sites == ("stage0.0:input", "stage1.0:input")
    for rank in (0, 1):
        amax = batch(rank, 1).abs().max().item()
        for run in (own, beside):
            found = test_ranks.row(run, f"stage{rank}.0:input", 1)
            assert (found["ranks"], found["amax"]) == (1, amax)


def test_where_only_the_run_itself_can_be_gathered_that_is_merged(tmp_path, monkeypatch):
    program = made(tmp_path)
    monkeypatch.setattr(ranks, "MOST_BYTES", 2 * 8 * 3 * 700)  # of two ranks, two sites of 685 numbers and scalars
    train(program, 2, shown)
    run = finished(program, tmp_path)
    assert run.meta["notes"] == []
    assert set(run.tensors()["ranks"].tolist()) == {2}
    beside = open_run(tmp_path / "run" / "what_if" / "rowwise").tensors()
    assert (set(beside["ranks"].tolist()), set(beside["rank"].tolist()), beside.rows) == ({1}, {0, 1}, 8)


PROGRAM = (
    "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
    "from torch.nn.parallel import DistributedDataParallel\n"
    + MODEL
    + f"""
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range({STEPS}):
    model(batch(step, rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("seldom", [True, False])
def test_a_ranking_of_two_real_ranks_is_of_the_tensors_as_a_whole(warm_python, tmp_path, seldom):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "ask.toml").write_text('[watch]\nwhat_if = ["current", "rowwise", "blockwise"]\n')
    asking = [] if seldom else ["--config", "ask.toml"]
    command = ["run", "--out", "out", "--every", "1", *asking, "--", "python", RANKS, "2", str(free_port()), "train.py"]
    done = warm_python.narrowgauge(command, cwd=tmp_path, env={**PLAIN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    last = 1 if seldom else STEPS
    want = by_hand(2, steps=last)[0]
    run = open_run(tmp_path / "out")
    assert run.meta["ranks"]["merged_steps"] == STEPS
    for name in ("rowwise", "blockwise"):
        beside = open_run(tmp_path / "out" / "what_if" / name)
        assert sorted(set(beside.tensors()["step"].tolist())) == list(range(1, last + 1))
        assert manifests.ranks(beside.path) == [0]  # the other had nothing to write
        check_whole(rows(beside, last, ""), want)
    found = readiness(run)
    assert [asked.name for asked in found.recipes][:3] == ["current", "rowwise", "blockwise"]
    assert {asked.sites for asked in found.recipes} == {len(want)}
