"""torchao's float8 over two ranks: scales come from all parts of a tensor, and some reach their layers in FP8."""

import pytest
from tests.integrations.watched import check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = (
    WorksWith("torchao float8 and FSDP2", ("torchao",), "weights gathered in FP8, each rank its shard", ranks=2),
    WorksWith("torchao float8 and tensor parallelism", ("torchao",), "one scale for all parts of a tensor", ranks=2),
)
KINDS = {"gathered": WORKS[0], "gathered, scales before": WORKS[0], "cut": WORKS[1], "cut, cast before": WORKS[1]}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module", params=KINDS)
def seen(request, tmp_path_factory, warm_python):
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
    told = {"KIND": request.param, "KEEP_CASTS": "1"}
    return play(KINDS[request.param], tmp_path_factory, "torchao_ranks", launcher, warm_python, really=False, **told)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)


def test_rate_norm_and_tokens_are_what_they_are_by_hand(seen, request):
    check_scalars(seen, same_data=request.node.callspec.params["seen"].startswith("cut"))


def test_every_tensor_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert {site for _, site in want} == {f"{n}:{role}" for n in "13" for role in ("input", "weight", "grad_output")}
