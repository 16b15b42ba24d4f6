"""Recipes are frozen data that refuse to contradict themselves."""

from dataclasses import FrozenInstanceError, replace

import pytest

from narrowgauge.compute import quant
from narrowgauge.compute.recipes import (
    BLOCKWISE,
    CATALOG,
    CURRENT,
    DELAYED,
    MXFP8,
    MXFP8_OCP,
    ROLES,
    ROWWISE,
    STATIC,
    Gemm,
    Operand,
    by_name,
    fake,
)
from narrowgauge.errors import RecipeError
from narrowgauge.formats import E4M3FN, E5M2


def formats(recipe):
    return {role: tuple(operand.fmt.name for operand in recipe.uses(role)) for role in ROLES}


def test_tensorwise_recipes_use_e5m2_for_gradients_only():
    for recipe in (CURRENT, DELAYED, STATIC):
        assert formats(recipe) == {
            "input": ("E4M3FN", "E4M3FN"),
            "weight": ("E4M3FN", "E4M3FN"),
            "grad_output": ("E5M2", "E5M2"),
        }


def test_fine_grained_recipes_use_e4m3_everywhere():
    for recipe in (ROWWISE, BLOCKWISE, MXFP8, MXFP8_OCP):
        assert set().union(*formats(recipe).values()) == {"E4M3FN"}


def test_nothing_accumulates_short_unless_asked():
    for recipe in CATALOG.values():
        assert not any((recipe.fprop.fast_accum, recipe.dgrad.fast_accum, recipe.wgrad.fast_accum))


def test_a_copy_is_shared_where_the_scales_transpose():
    shared = {recipe.name: [recipe.shares(role) for role in ROLES] for recipe in CATALOG.values()}
    assert shared["current"] == shared["delayed"] == shared["static"] == [True, True, True]
    assert shared["rowwise"] == shared["mxfp8"] == shared["mxfp8-ocp"] == [False, False, False]
    assert shared["blockwise"] == [False, True, False]  # 128x128 blocks are their own transpose


def test_every_recipe_says_what_it_is_and_where_it_comes_from():
    for recipe in CATALOG.values():
        assert len(recipe.description) > 80
        assert "\n" not in recipe.description
        assert recipe.source


def test_with_changes_every_operand_it_should_and_no_other():
    changed = CURRENT.with_(margin=2, power_of_two=True, grad_output="e4m3fn")
    operands = [operand for role in ROLES for operand in changed.uses(role)]
    assert {o.margin for o in operands} == {2}
    assert {o.scaling for o in operands} == {quant.CURRENT_POW2}
    assert {o.fmt for o in operands} == {E4M3FN}
    assert formats(CURRENT)["grad_output"] == ("E5M2", "E5M2")  # the original is as it was
    only_input = CURRENT.with_(input=E5M2)
    assert formats(only_input) == {
        "input": ("E5M2", "E5M2"),
        "weight": ("E4M3FN", "E4M3FN"),
        "grad_output": ("E5M2", "E5M2"),
    }


def test_power_of_two_can_be_undone():
    assert ROWWISE.with_(power_of_two=True).uses("input")[0].scaling == quant.ROWWISE_POW2
    assert ROWWISE.with_(power_of_two=True).with_(power_of_two=False) == ROWWISE


def test_with_changes_fields_and_tables():
    recipe = DELAYED.with_(history=16, algorithm="most_recent", initial="one", name="mine")
    assert (recipe.history, recipe.algorithm, recipe.initial, recipe.name) == (16, "most_recent", "one", "mine")
    assert STATIC.with_(scales={"a:input": 0.5}, refresh_every=7).scales == (("a:input", 0.5),)
    assert CURRENT.with_(fast_accum=True).fprop.fast_accum is True


def test_recipes_are_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        CURRENT.history = 3
    assert len({*CATALOG.values(), CURRENT.with_(margin=0)}) == len(CATALOG)


def test_by_name_is_forgiving_about_case_and_dashes():
    assert by_name("MXFP8_OCP") is MXFP8_OCP
    assert by_name(" Current ") is CURRENT
    assert by_name("fake-current") == fake(CURRENT)


def test_fake_keeps_the_operands_and_happens_once():
    faked = fake(BLOCKWISE)
    assert faked.fake
    assert faked.name == "fake-blockwise"
    assert (faked.fprop, faked.dgrad, faked.wgrad) == (BLOCKWISE.fprop, BLOCKWISE.dgrad, BLOCKWISE.wgrad)
    assert fake(faked) is faked


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: by_name("fp4"),
            "no recipe is called 'fp4'; all are of 8 bits: blockwise, current, delayed, mxfp8, mxfp8-ocp, "
            "rowwise, static.",
        ),
        (lambda: by_name("fp8"), "no recipe is called 'fp8'; did you mean 'mxfp8'?"),
        (lambda: by_name("curent"), "no recipe is called 'curent'; did you mean 'current'?"),
        (lambda: DELAYED.with_(algorithm="mx"), "algorithm is 'mx'; did you mean 'max'?"),
        (lambda: DELAYED.with_(initial="first"), "initial is 'first'; there are: current, one."),
        (lambda: CURRENT.with_(state="delaid"), "state is 'delaid'; did you mean 'delayed'?"),
        (lambda: CURRENT.with_(margn=1), "a recipe has nothing called 'margn'; did you mean 'margin'?"),
        (lambda: CURRENT.with_(weight="E4M3F"), "no number format is called 'E4M3F'; did you mean 'E4M3FN'?"),
        (lambda: DELAYED.with_(history=0), "recipe 'delayed': history is 0; it counts steps, so 1 or more."),
        (lambda: STATIC.with_(refresh_every=-1), "recipe 'static': refresh_every is -1; give steps, or 0 for never."),
        (lambda: CURRENT.with_(margin=1.5), "recipe 'current': margin is 1.5; give a whole number."),
        (lambda: DELAYED.with_(history=2.5), "recipe 'delayed': history is 2.5; give a whole number."),
        (
            lambda: CURRENT.with_(scales={"a:input": 1.0}),
            "recipe 'current': a table of scales needs state='static', found state='none'.",
        ),
        (
            lambda: STATIC.with_(scales={"a:input": 0.0}),
            "recipe 'static': the scale of 'a:input' is 0.0; expected a number from 2.94e-39 to 3.4e+38.",
        ),
        (
            lambda: ROWWISE.with_(state="delayed"),
            "recipe 'rowwise', input: state='delayed' keeps one scale per tensor, found PerRow(); use PerTensor(), "
            "or state='none'.",
        ),
        (
            lambda: CURRENT.with_(input="E8M0"),
            "recipe 'current', input: E8M0 cannot be multiplied as FP8; use E4M3FN or E5M2.",
        ),
        (
            lambda: replace(ROWWISE, fprop=Gemm(Operand(E4M3FN, quant.PerColumn(), quant.ROWWISE), ROWWISE.fprop.b)),
            "recipe 'rowwise', input: PerColumn varies along the contracted dimension and cannot be factored out of "
            "the product; operands are written with that dimension last, so use PerRow.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(make, message):
    with pytest.raises(RecipeError) as caught:
        make()
    assert str(caught.value) == message


def test_a_stateful_role_is_quantized_one_way():
    odd = replace(DELAYED.wgrad, b=replace(DELAYED.wgrad.b, fmt=E5M2))
    with pytest.raises(RecipeError, match="its two gemms ask for"):
        replace(DELAYED, wgrad=odd)
