import pytest

from narrowgauge.errors import UsageError
from narrowgauge.metrics import OPERAND_ROLES, RESULT_ROLES, ROLES, Site


@pytest.mark.parametrize("role", ROLES)
def test_a_site_survives_a_round_trip_through_text(role):
    site = Site("layers.3.w2", role)
    assert str(site) == f"layers.3.w2:{role}"
    assert Site.parse(str(site)) == site


def test_the_model_itself_and_names_with_colons_are_modules():
    assert Site.parse(":input") == Site("", "input")
    assert Site.parse("a:b:weight") == Site("a:b", "weight")


def test_operands_and_results():
    assert ROLES == OPERAND_ROLES + RESULT_ROLES
    assert [Site("m", role).is_operand for role in ROLES] == [True] * 3 + [False] * 3


def test_an_unknown_role_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="there is no role 'grad_outputs'; did you mean 'grad_output'"):
        Site("m", "grad_outputs")


def test_text_without_a_role_is_refused_with_an_example():
    with pytest.raises(UsageError, match=r"'layers\.0\.w2' is not a site; write module:role, for example"):
        Site.parse("layers.0.w2")
