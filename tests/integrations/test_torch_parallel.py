"""torch's own ways of giving each rank a part of the model: of every layer, by tensor parallelism, or some layers."""

import pytest
from tests.integrations.watched import check_converted, check_logged, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

CUT = WorksWith(
    "torch's tensor parallelism",
    ("torch",),
    "`parallelize_module` by column, row and sequence, `loss_parallel`, accumulation, clipping",
    ranks=2,
    converted=True,
)
STAGED = WorksWith(
    "torch's pipelining",
    ("torch",),
    "two stages in `Schedule1F1B`, clipping by the norm of both",
    ranks=2,
    converted=True,
)
WORKS = (CUT, STAGED)
LAUNCHER = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
ATTENTION = {f"1.{name}" for name in "qkvo"}
MLPS = [{f"layers.{i}.{n}" for i in layers for n in (1, 3)} for layers in ((0, 1), (2, 3))]  # of each stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def cut(tmp_path_factory, warm_python):
    return play(CUT, tmp_path_factory, "tensor_parallel", LAUNCHER, warm_python, really=False)


@pytest.fixture(scope="module")
def staged(tmp_path_factory, warm_python):
    return play(STAGED, tmp_path_factory, "pipeline", LAUNCHER, warm_python, really=False, STAGES="1")


def names(keys):
    return {site.partition(":")[0] for _, site in keys}


def test_layers_that_are_cut_are_watched(cut):
    check_unharmed(cut)
    check_scalars(cut, same_data=True)
    check_logged(cut, cut.watched.said)
    check_tensors(cut, cut.case.rows_by_hand())


def test_of_a_layer_that_is_cut_the_ranks_have_parts_or_copies(cut):
    first, second = cut.case.each_by_hand().values()
    assert names(first) == names(second) == ATTENTION | {"1.up", "1.down", "3"}
    copies = {site for step, site in first if first[step, site] == second[step, site]}
    by_columns, by_rows = {"1.q", "1.k", "1.v", "1.up", "3"}, {"1.o", "1.down"}
    assert copies == {f"{name}:input" for name in by_columns} | {f"{name}:grad_output" for name in by_rows}


def test_layers_that_are_cut_are_converted(cut):
    check_converted(cut)


def test_stages_are_watched(staged):
    check_unharmed(staged)
    check_scalars(staged, stages=True)
    check_logged(staged, staged.watched.said, microbatches=4)
    check_tensors(staged, staged.case.rows_by_hand(), ranks=[1])
    first, second = staged.case.each_by_hand().values()
    assert [names(first), names(second)] == [MLPS[0], MLPS[1] | {"head"}]


def test_stages_are_converted(staged):
    check_converted(staged, ranks=[1])
    metas = staged.case.run("converted").metas
    assert [{row["name"] for row in metas[rank]["conversion"] if row["recipe"]} for rank in range(2)] == MLPS
