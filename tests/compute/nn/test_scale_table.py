"""The table of delayed and static scales: known answers, edges, saving and loading."""

import pytest
import torch
from tests.compute.nn.layers import Seen, adopt
from torch import nn

from narrowgauge.compute.nn.scaling.scale_table import ScaleTable, amax_ratio
from narrowgauge.compute.quant import quantize
from narrowgauge.compute.recipes import CURRENT, DELAYED, STATIC
from narrowgauge.errors import ConversionError, ShapeError

INPUT = DELAYED.uses("input")[0]
GRAD = DELAYED.uses("grad_output")[0]


def table_of(recipe, *modules):
    table = ScaleTable()
    for module in modules or ("a",):
        table.add(module, recipe)
    return table


def step(table, *amaxes, row=0):
    for amax in amaxes:
        table.record(row, torch.tensor(float(amax)))
    table.roll()
    return table.inv_scale[row].item()


def test_inv_scale_follows_the_window():
    table = table_of(DELAYED.with_(history=3))
    assert [step(table, amax) for amax in (2, 8, 1, 1, 1)] == [224, 56, 56, 56, 448]


@pytest.mark.parametrize("margin", [1, 3])
def test_margin_divides_by_a_power_of_two(margin):
    table = table_of(DELAYED.with_(history=3, margin=margin))
    assert [step(table, amax) for amax in (2, 8)] == [224 / 2**margin, 56 / 2**margin]


def test_most_recent_forgets_at_once():
    table = table_of(DELAYED.with_(history=3, algorithm="most_recent"))
    assert [step(table, amax) for amax in (2, 8, 1)] == [224, 56, 448]


def test_each_role_has_its_own_format():
    table = table_of(DELAYED)
    for row in range(3):
        table.record(row, torch.tensor(2.0))
    table.roll()
    assert table.inv_scale.tolist() == [224, 224, 28672]


def test_a_step_takes_the_largest_of_its_microbatches():
    table = table_of(DELAYED.with_(history=4))
    step(table, 1, 7, 3)
    assert table.history[0].tolist() == [7, 0, 0, 0]


def test_the_scale_is_made_before_this_steps_amax_is_known():
    table = table_of(DELAYED.with_(history=3))
    step(table, 2)
    assert table.scale_of(0, INPUT, torch.tensor(100.0), write=True)[1].item() == 224


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_amax_is_never_stored(bad):
    table = table_of(DELAYED.with_(history=3))
    step(table, 2)
    assert step(table, bad) == 224
    assert table.history[0].tolist() == [2, 0, 0]
    assert step(table, bad, 4) == 112  # the other microbatch was fine
    assert table.history[0].tolist() == [4, 2, 0]


def test_zeros_keep_the_old_scale_and_no_data_changes_nothing():
    table = table_of(DELAYED.with_(history=2), "a", "b")
    step(table, 2)
    before = table.history[3:].clone(), table.scale[3:].clone()
    assert [step(table, 0) for _ in range(3)] == [224, 224, 224]
    assert table.history[0].tolist() == [0, 0]
    assert torch.equal(table.history[3:], before[0])
    assert torch.equal(table.scale[3:], before[1])


def test_the_first_tensor_sets_its_own_scale_until_the_first_roll():
    table = table_of(DELAYED)
    first = table.scale_of(0, INPUT, torch.tensor(2.0), write=True)
    again = table.scale_of(0, INPUT, torch.tensor(50.0), write=True)
    assert first[0].item() == again[0].item() == pytest.approx(2 / 448)
    table.record(0, torch.tensor(2.0))
    table.record(0, torch.tensor(50.0))
    table.roll()
    assert table.scale_of(0, INPUT, torch.tensor(1.0), write=True)[0].item() == pytest.approx(50 / 448)


def test_reading_a_first_tensor_does_not_set_the_scale():
    table = table_of(DELAYED)
    table.scale_of(0, INPUT, torch.tensor(2.0), write=False)
    assert table.scale_of(0, INPUT, torch.tensor(4.0), write=True)[0].item() == pytest.approx(4 / 448)


@pytest.mark.parametrize("useless", [0.0, float("inf"), float("nan")])
def test_a_first_tensor_without_a_usable_amax_leaves_the_choice_to_the_next(useless):
    table = table_of(DELAYED)
    assert table.scale_of(2, GRAD, torch.tensor(useless), write=True)[0].item() == 1
    table.record(2, torch.tensor(useless))
    table.roll()
    assert table.scale_of(2, GRAD, torch.tensor(1e-6), write=True)[0].item() == pytest.approx(1e-6 / 57344)


def test_initial_one():
    table = table_of(DELAYED.with_(initial="one"))
    assert table.scale_of(0, INPUT, torch.tensor(5.0), write=True)[0].item() == 1


def test_static_keeps_its_scales_and_refreshes_on_time():
    table = table_of(STATIC.with_(scales={"a:input": 0.25}, refresh_every=3))
    assert [step(table, amax) for amax in (2, 4, 8, 16)] == [4, 4, 56, 56]  # the third step's own amax
    table = table_of(STATIC.with_(scales={"a:input": 0.25}))
    assert [step(table, amax) for amax in (2, 4, 8)] == [4, 4, 4]
    assert table.scale_of(1, INPUT, torch.tensor(2.0), write=True)[0].item() == pytest.approx(2 / 448)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scales_and_histories_are_float32_whatever_the_program_s_default_is(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        table = table_of(DELAYED.with_(history=2), "a", "b")
        table.record(0, torch.tensor(1.01, dtype=torch.float32))
        table.record(2, torch.tensor(1e-9, dtype=torch.float32))
        table.roll()
        table.reset("b")
    finally:
        torch.set_default_dtype(before)
    kept = table.history, table.scale, table.inv_scale, table.amax_now
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert table.history[:3, 0].tolist() == torch.tensor([1.01, 0, 1e-9]).tolist()
    assert table.inv_scale[:3].tolist() == (torch.tensor([448, 0, 57344.0]) / torch.tensor([1.01, 1, 1e-9])).tolist()


def test_the_least_scale_that_another_run_can_have_used_makes_no_nan():
    least = quantize(torch.full((1, 16), 1e-42), INPUT.fmt).scale
    layer = adopt(nn.Linear(16, 16), STATIC.with_(scales={"layer:input": float(least)}))
    assert layer(torch.zeros(1, 16)).isfinite().all()


def test_scales_for_sites_that_do_not_exist_are_an_error():
    recipe = STATIC.with_(scales={"layer.0:inputs": 0.25})
    with pytest.raises(ConversionError) as caught:
        table_of(recipe, "layer.0").check_scales(recipe)
    assert str(caught.value) == (
        "recipe 'static' gives a scale to 'layer.0:inputs', which is no converted site; did you mean 'layer.0:input'?"
    )


def test_recipes_with_different_histories_share_a_table():
    table = ScaleTable()
    table.add("short", DELAYED.with_(history=1))
    table.add("long", DELAYED.with_(history=3))
    for amax in (8.0, 1.0):
        table.record(0, torch.tensor(amax))
        table.record(3, torch.tensor(amax))
        table.roll()
    assert table.inv_scale[[0, 3]].tolist() == [448, 56]


def test_long_accumulation_folds_by_itself():
    table = table_of(DELAYED)
    for i in range(5000):
        table.record(0, torch.tensor(float(i % 4500)))
    assert table.amax_now[0] == 4095  # folded once, before the roll
    assert len(table._pending) == 5000 - 4096
    table.roll()
    assert table.history[0, 0] == 4499


def test_amax_ratio_is_one_where_the_history_was_right():
    table = table_of(DELAYED.with_(margin=2))
    step(table, 8)
    assert amax_ratio(torch.tensor(32.0), table.scale[0], table._groups[0].operand).item() == pytest.approx(4)


def test_state_goes_out_and_comes_back():
    recipe = DELAYED.with_(history=3)
    table = table_of(recipe, "a", "b")
    for amax in (2, 8):
        step(table, amax, row=4)
    table.record(4, torch.tensor(5.0))  # in the middle of a step
    twin = table_of(recipe, "a", "b")
    for module in ("a", "b"):
        state = table.state(module)
        assert {name: tuple(t.shape) for name, t in state.items()} == {
            "history": (3, 3),
            "scale": (3,),
            "inv_scale": (3,),
            "amax_now": (3,),
            "steps": (),
        }
        twin.load(module, state)
    assert twin.steps == 2
    assert step(table, 1, row=4) == step(twin, 1, row=4) == 56
    assert torch.equal(table.history, twin.history)
    assert twin.scale_of(0, INPUT, torch.tensor(2.0), write=True)[0].item() == pytest.approx(2 / 448)  # still waiting


def test_state_of_another_history_is_refused():
    saved = table_of(DELAYED.with_(history=3)).state("a")
    with pytest.raises(ShapeError) as caught:
        table_of(DELAYED.with_(history=4)).load("a", saved)
    assert str(caught.value) == (
        "the saved scaling state of 'a' has history [3, 3], expected [3, 4]; convert with the recipe it was saved "
        "with, history included, or drop the saved state."
    )
    del saved["scale"]
    with pytest.raises(ShapeError, match="has scale None, expected \\[3\\]"):
        table_of(DELAYED.with_(history=3)).load("a", saved)
    with pytest.raises(ConversionError, match="no scaling state is kept for 'blok'; did you mean 'block'"):
        table_of(DELAYED, "block").state("blok")


def test_a_name_is_used_once():
    table = table_of(DELAYED)
    with pytest.raises(ConversionError, match="'a' already has its rows in this table"):
        table.add("a", DELAYED)


def test_two_microbatches_with_one_scale_equal_their_concatenation():
    x, w = torch.randn(16, 64), torch.randn(48, 64)
    layers = []
    for _ in range(2):
        layer = nn.Linear(64, 48, bias=False)
        layer.weight.data = w.clone()
        layers.append(adopt(layer, STATIC.with_(scales={f"layer:{r}": 0.01 for r in ("input", "weight")})))
    whole, halves = layers
    together = whole(x)
    apart = torch.cat([halves(x[:8]), halves(x[8:])])
    assert torch.equal(together, apart)
    for layer in layers:
        layer._fp8.table.fold()
    assert torch.equal(whole._fp8.table.amax_now, halves._fp8.table.amax_now)


def test_a_steady_tensor_gets_the_codes_of_current_scaling():
    x, seen = torch.randn(8, 64), [Seen(), Seen()]
    for recipe, observer in zip((DELAYED.with_(history=2), CURRENT), seen, strict=True):
        torch.manual_seed(0)
        layer = adopt(nn.Linear(64, 48), recipe)
        layer._fp8.observer = observer
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for _ in range(3):
            layer(x).square().sum().backward()
            optimizer.step()
    for site, shown in seen[0].operands.items():
        for (_, ours, _), (_, theirs, _) in zip(shown, seen[1].operands[site], strict=True):
            assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
            assert torch.equal(ours.scale, theirs.scale)


def test_inv_scale_is_not_rounded_twice_on_its_way_to_the_codes():
    layer, seen = adopt(nn.Linear(16, 16), DELAYED.with_(history=2)), Seen()
    layer._fp8.observer = seen
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.full((4, 16), 8.0)
    x[0, 0] = 1.1875 / 56  # a tie at inv_scale 56, and 1 / fl(1 / 56) is just below 56
    for _ in range(2):
        layer(x).sum().backward()
        optimizer.step()
    (_, q, _) = seen.operands["layer", "input"][1]
    assert q.codes[0, 0].float() == 1.25


def test_the_ratio_reaches_the_observer():
    layer, seen = adopt(nn.Linear(64, 48), DELAYED.with_(history=2)), Seen()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer._fp8.observer = seen
    for amax in (1.0, 4.0):
        layer(torch.full((8, 64), amax)).sum().backward()
        optimizer.step()
    assert [ratio.item() for _, _, ratio in seen.operands["layer", "input"]] == pytest.approx([1, 4])
