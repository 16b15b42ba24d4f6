"""torch's own ways of training on several ranks: torchrun with DistributedDataParallel, and with FSDP2."""

import pytest
from tests.integrations.watched import check_converted, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = (
    WorksWith("torchrun and DDP", ("torch",), "`no_sync` accumulation", ranks=2, converted=True),
    WorksWith("FSDP2", ("torch",), "`fully_shard` per layer, gathered weights, clipping", ranks=2, converted=True),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module", params=zip(WORKS, ("ddp", "fsdp2"), strict=True), ids=("ddp", "fsdp2"))
def seen(request, tmp_path_factory, warm_python):
    works, program = request.param
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
    return play(works, tmp_path_factory, program, launcher, warm_python, really=program == "ddp")


def test_it_is_watched(seen):
    check_unharmed(seen)
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert {site.partition(":")[0] for _, site in want} == {"1", "3"}
    assert list(seen.case.losses_by_hand()[0].values()) == pytest.approx(seen.watched.said, rel=1e-6)
    check_scalars(seen)


def test_it_is_converted(seen):
    check_converted(seen, within=0.05)
    plain = seen.case.rows_by_hand()
    for (step, site), row in seen.case.rows("converted").items():  # and nothing is seen twice
        assert row["numel"] == plain.get((step, site), row)["numel"], (step, site)
