"""DeepSpeed's experts: each rank counts its own from 0, and the run has all of them, as the whole does."""

import pytest
from tests.integrations.differences import differences
from tests.integrations.watched import NEAR, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith("DeepSpeed", ("deepspeed",), "its layer of experts, two on each rank, and not its gate", ranks=2)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
    return play(WORKS, tmp_path_factory, "deepspeed_experts", launcher, warm_python, really=False)


def test_every_expert_has_rows_of_its_own_with_the_values_by_hand(seen):
    assert seen.watched.code == 0, seen.watched.err
    assert seen.watched.said == seen.case.alone().said  # what counts by hand moves memory, and with it last digits
    want, layers = seen.case.rows_by_hand(), "moe.deepspeed_moe"
    names = {f"{layers}.experts.deepspeed_experts.{expert}.{layer}" for expert in range(4) for layer in (0, 2)}
    assert {site.partition(":")[0] for _, site in want} == names
    # The gate, which both ranks have, multiplies without calling its layer: the run sees it, who counts by hand not.
    found = {
        key: row for key, row in seen.case.rows(ranks=[1, 2]).items() if not key[1].startswith(f"{layers}.gate.wg:")
    }
    assert differences(found, want, NEAR) == []
