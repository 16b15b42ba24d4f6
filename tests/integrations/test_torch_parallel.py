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
WORKS = (CUT,)
LAUNCHER = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
ATTENTION = {f"1.{name}" for name in "qkvo"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def cut(tmp_path_factory, warm_python):
    return play(CUT, tmp_path_factory, "tensor_parallel", LAUNCHER, warm_python, really=False)


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
