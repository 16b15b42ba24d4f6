"""torch's own ways of training on several ranks: torchrun with DistributedDataParallel, and with FSDP2."""

import pytest
from tests.integrations.watched import check_converted, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

SHARDED = "`fully_shard` per layer, gathered weights, clipping; BF16, accumulation, checkpoints"
WORKS = (
    WorksWith("torchrun and DDP", ("torch",), "`no_sync` accumulation", ranks=2, converted=True),
    WorksWith("FSDP2", ("torch",), SHARDED, ranks=2, converted=True),
)
# Program, what it is told, its linear layers.
PROGRAMS = {
    "ddp": (WORKS[0], {}, {"1", "3"}),
    "fsdp2": (WORKS[1], {}, {"1", "3"}),
    "fsdp2 mixed": (WORKS[1], {"MIXED": "yes"}, {"1.0", "1.2", "2.0", "2.2", "3"}),
}
MADE = {"ddp": (2, "float32"), "fsdp2": (1, "float32"), "fsdp2 mixed": (2, "bfloat16")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module", params=PROGRAMS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def seen(kind, tmp_path_factory, warm_python):
    works, env, _ = PROGRAMS[kind]
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
    program, really = kind.split()[0], kind == "ddp"
    return play(works, tmp_path_factory, program, launcher, warm_python, really=really, **env)


def test_it_is_watched(seen, kind):
    check_unharmed(seen)
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert {site.partition(":")[0] for _, site in want} == PROGRAMS[kind][2]
    assert list(seen.case.losses_by_hand()[0].values()) == pytest.approx(seen.watched.said, rel=1e-6)
    check_scalars(seen)
    microbatches, dtype = MADE[kind]
    run = seen.case.run()
    assert set(run.scalars()["microbatches"].tolist()) == {microbatches}
    assert run.meta["baseline_dtype"] == dtype


def test_it_is_converted(seen):
    check_converted(seen, within=0.05)
    plain = seen.case.rows_by_hand()
    for (step, site), row in seen.case.rows("converted").items():  # and nothing is seen twice
        assert row["numel"] == plain.get((step, site), row)["numel"], (step, site)
