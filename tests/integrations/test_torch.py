"""torch's own ways of training on several ranks: torchrun with DistributedDataParallel, and with FSDP2."""

import math

import pytest
from tests.integrations.watched import TOLERANCES, check_converted, check_tensors, check_unharmed, play
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
    return play(works, tmp_path_factory, program, launcher, warm_python)


def test_it_is_watched(seen):
    check_unharmed(seen)
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert {site.partition(":")[0] for _, site in want} == {"1", "3"}
    assert list(seen.case.losses_by_hand()[0].values()) == pytest.approx(seen.watched.said, rel=1e-6)


def test_it_is_converted(seen):
    check_converted(seen)
    found, plain = seen.case.rows("converted"), seen.case.rows_by_hand()
    for role in ("input", "weight"):  # of the first step, before anything can differ
        row, want = found[1, f"1:{role}"], plain[1, f"1:{role}"]
        for name in TOLERANCES:
            assert math.isclose(row[name], want[name], rel_tol=max(TOLERANCES[name], 1e-9)), (role, name)
    for (step, site), row in found.items():  # and nothing is seen twice
        assert row["numel"] == plain.get((step, site), row)["numel"], (step, site)
    assert seen.converted.said == pytest.approx(seen.plain.said, rel=0.05)
    assert seen.converted.said != seen.plain.said
