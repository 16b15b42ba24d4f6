"""A loop of one's own on Accelerate: two ranks, autocast to BF16, accumulation, clipping, a schedule; what
every recipe would do to its tensors, as any run tells it, and how long the ranks wait for their data."""

import pytest
from tests.integrations import what_if
from tests.integrations.watched import (
    DEVICE,
    check_converted,
    check_logged,
    check_scalars,
    check_tensors,
    check_unharmed,
    check_waits,
    play,
)
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Accelerate", ("accelerate",), "`accelerate launch`, BF16 autocast, accumulation, clipping", ranks=2, converted=True
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    words = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "bf16"]
    launcher = ("accelerate", "launch", *words, "--dynamo_backend", "no", "--main_process_port", "PORT")
    return play(WORKS, tmp_path_factory, "accelerate_loop", launcher, warm_python, hand={**what_if.HAND, "ASKED": "1"})


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)


def test_every_tensor_of_both_ranks_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert {site.partition(":")[0] for _, site in want} == {"1", "3"}  # not module.1: the wrapper leaves no mark
    assert seen.case.run().meta["baseline_dtype"] == "bfloat16"


def test_what_every_other_recipe_would_make_of_the_ranks_tensors_together_is_what_it_is_by_hand(seen):
    # Of what nobody asked for by name, kernels of a GPU count the first three alone.
    recipes = what_if.RECIPES if DEVICE == "cpu" else what_if.RECIPES[:3]
    want = what_if.by_hand(seen, recipes, steps=[1])
    what_if.check_recipes(seen, want)
    what_if.check_ranked(seen, want)


def test_what_each_step_waited_for_its_data_is_that_of_the_slower_rank(seen):
    ranks = seen.case.waits().values()
    waits = [{name: max(row[name] for row in step) for name in step[0]} for step in zip(*ranks, strict=True)]
    check_waits(seen.case.run().scalars()["data_seconds"].tolist(), waits, slept=True)


def test_loss_norm_and_rate_are_those_of_the_script(seen):
    check_logged(seen, seen.watched.said)


def test_its_layers_are_converted(seen):
    check_converted(seen)
