"""torchao's float8: its converted layers are seen as what they are, one that it left out as what it would be."""

import pytest
from tests.integrations.watched import Case, check_refused, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith("torchao float8", ("torchao",), "`convert_to_float8_training`, its own casts, emulated")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    return play(WORKS, tmp_path_factory, "torchao_float8", warm=warm_python, really=False)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)


def test_every_tensor_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert {site.partition(":")[0] for _, site in want} == {"1", "3"}


def test_losses_are_those_of_the_script(seen):
    assert seen.case.run().scalars()["loss"].tolist() == pytest.approx(seen.watched.said, rel=1e-6)


def test_where_all_layers_are_its_own_a_conversion_ends_the_program_in_words(seen, tmp_path, warm_python):
    case = Case(tmp_path, "torchao_float8", warm=warm_python, LEFT_OUT="none")
    why = "('1', '3': Float8Linear is a subclass of nn.Linear with a behaviour of its own)."
    check_refused(case, case.converted(hand=False), f"none of the 2 linear layers of Sequential can be converted {why}")
