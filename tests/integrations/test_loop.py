"""A loop of one's own, nothing but torch, whose tensors are so large that errors come from a share of their rows."""

import pytest
from tests.integrations.watched import check_converted, check_logged, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith("PyTorch", ("torch",), "a plain loop, accumulation, tensors of 512 rows", converted=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    return play(WORKS, tmp_path_factory, "loop", warm=warm_python, really=False)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)
    check_logged(seen, seen.watched.said)


def test_every_tensor_is_what_it_is_by_hand_of_the_same_rows(seen):
    want = seen.case.rows_by_hand()
    assert {site.partition(":")[0] for _, site in want} == {"1", "3"}
    check_tensors(seen, want)


def test_errors_of_a_share_of_the_rows_are_as_near_to_those_of_all_as_the_share_lets_them_be(seen):
    want = {key: row["of_all"] for key, row in seen.case.rows_by_hand().items()}
    off = {key: abs(row["mse"] - want[key]["mse"]) for key, row in seen.case.rows().items()}
    shared = {key for key, row in want.items() if row["deviation"]}
    assert {site for _, site in shared} == {f"{layer}:{role}" for layer in "13" for role in ("input", "grad_output")}
    assert all(off[key] <= 4 * row["deviation"] + 1e-3 * row["mse"] for key, row in want.items())
    assert max(off[key] / want[key]["mse"] for key in shared) > 0.01  # they are not of all


def test_its_layers_are_converted(seen):
    check_converted(seen)
