"""Loops of one's own, nothing but torch, whose tensors are so large that errors come from a share of their rows; one in
autocast to float16, whose first step overflows and is skipped by its gradient scaler."""

import math

import pytest
from tests.integrations.watched import (
    DEVICE,
    check_converted,
    check_logged,
    check_scalars,
    check_tensors,
    check_unharmed,
    play,
)
from tests.integrations.works_with import WorksWith

WORKS = (
    WorksWith("PyTorch", ("torch",), "a plain loop, accumulation, tensors of 512 rows", converted=True),
    WorksWith(
        "PyTorch, `torch.amp`",
        ("torch",),
        "float16 autocast, `GradScaler`, accumulation, clipping, a skipped step",
        converted=True,
    ),
)
KINDS = {"plain": (WORKS[0], {}), "amp": (WORKS[1], {"AMP": "1"})}
SKIPPED = {"plain": [], "amp": [1]}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def seen(kind, tmp_path_factory, warm_python):
    works, env = KINDS[kind]
    return play(works, tmp_path_factory, "loop", warm=warm_python, really=False, **env)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)
    check_logged(seen, seen.watched.said, norm=False)


def test_norm_and_scale_are_those_of_the_script_and_skipped_steps_are_told(seen, kind):
    found, said = seen.case.run().scalars(), seen.watched.said
    norms = [math.nan if row["grad_norm"] is None else row["grad_norm"] for row in said]
    assert found["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5, nan_ok=True)
    assert set(found["nonfinite"].tolist()) == {0}
    assert ("skipped" in found, "loss_scale" in found) == (kind == "amp", kind == "amp")
    if kind == "amp":
        assert (found["skipped"] == 1).tolist() == [row["grad_norm"] is None for row in said] == [True] + 3 * [False]
        assert found["loss_scale"].tolist() == [row["scale"] for row in said] == [2.0**26, 2.0**16, 2.0**16, 2.0**17]


def test_every_tensor_is_what_it_is_by_hand_of_the_same_rows(seen, kind):
    want, found = seen.case.rows_by_hand(), seen.case.rows()
    assert {site.partition(":")[0] for _, site in want} == {"1", "3"}
    overflown = {(step, f"{layer}:grad_output") for step in SKIPPED[kind] for layer in "13"}
    check_tensors(seen, want | {key: found[key] for key in overflown})
    assert not overflown & want.keys()
    table = seen.case.run().tensors()
    keys = zip(table["step"].tolist(), table["site"].tolist(), strict=True)
    counts = table["inf_count"]
    if DEVICE != "cpu":  # where what comes behind an infinite gradient may be no number
        counts = counts + table["nan_count"]
    assert {key for key, count in zip(keys, counts.tolist(), strict=True) if count} == overflown


def test_errors_of_a_share_of_the_rows_are_as_near_to_those_of_all_as_the_share_lets_them_be(seen):
    want = {key: row["of_all"] for key, row in seen.case.rows_by_hand().items()}
    rows = seen.case.rows()
    off = {key: abs(rows[key]["mse"] - row["mse"]) for key, row in want.items()}
    shared = {key for key, row in want.items() if row["deviation"]}
    sites = {f"{layer}:{role}" for layer in "13" for role in ("input", "grad_output")}
    assert {site for _, site in shared} == (sites if DEVICE == "cpu" else set())  # a GPU takes all rows of so few
    assert all(off[key] <= 4 * row["deviation"] + 1e-3 * row["mse"] for key, row in want.items())
    assert not shared or max(off[key] / want[key]["mse"] for key in shared) > 0.01  # they are not of all


def test_its_layers_are_converted(seen):
    check_converted(seen)
