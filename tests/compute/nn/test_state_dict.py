"""state_dict of a converted model: the plain model's keys, and scaling state in the metadata."""

import copy
import io
import warnings

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from narrowgauge.compute import recipes
from narrowgauge.compute.nn import convert, load_scaling_state, revert, scaling_state
from narrowgauge.errors import ConversionError, NarrowgaugeWarning, ShapeError

DELAYED = recipes.DELAYED.with_(history=4)
FIELDS = {"history", "scale", "inv_scale", "amax_now", "steps"}


@pytest.fixture
def trained(gpt, run_steps):
    """A delayed model that has taken three steps."""
    model, _ = convert(gpt(), DELAYED)
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    return model


def fresh(gpt, recipe=DELAYED, **how):
    return convert(gpt(seed=1), recipe, **how)[0]


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def through_torch_save(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("recipe", ["current", "delayed", "static", "blockwise"])
def test_keys_are_those_of_the_plain_model_and_load_strictly_both_ways(gpt, recipe):
    plain, converted = gpt(seed=1, dim=128), convert(gpt(dim=128), recipe)[0]
    assert list(converted.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(converted.state_dict(), strict=True)
    assert same(plain.state_dict(), converted.state_dict())
    other = convert(gpt(seed=2, dim=128), recipe)[0]
    other.load_state_dict(plain.state_dict(), strict=True)
    assert same(other.state_dict(), plain.state_dict())


def test_metadata_carries_plain_tensors(trained):
    carried = trained.state_dict()._metadata["blocks.0.up"]["narrowgauge"]
    assert carried.keys() == FIELDS
    assert all(type(value) is torch.Tensor for value in carried.values())
    assert carried["history"].shape == (3, 4)
    assert (carried["history"][:, :3] > 0).all()
    assert carried["steps"] == 3


def test_recipes_without_state_carry_nothing(gpt):
    model, _ = convert(gpt(), "current")
    assert "narrowgauge" not in str(model.state_dict()._metadata)
    assert scaling_state(model) == {}


@pytest.mark.parametrize("route", [lambda state: state, through_torch_save, copy.deepcopy, copy.copy])
def test_state_survives_the_usual_routes(gpt, trained, route):
    model = fresh(gpt)
    model.load_state_dict(route(trained.state_dict()))
    assert same(scaling_state(model), scaling_state(trained))
    assert same(model.state_dict(), trained.state_dict())


def test_a_loaded_state_is_a_copy(gpt, trained, run_steps):
    state = trained.state_dict()
    before = copy.deepcopy(state._metadata["blocks.0.up"]["narrowgauge"])
    run_steps(trained, torch.optim.SGD(trained.parameters(), lr=0.1), 2)
    assert same(state._metadata["blocks.0.up"]["narrowgauge"], before)


def test_flat_state_round_trips_through_safetensors(gpt, trained):
    flat = scaling_state(trained)
    assert len(flat) == 6 * len(FIELDS)
    assert flat["narrowgauge.blocks.2.down.scale"].shape == (3,)
    shared_file = save_safetensors({**trained.state_dict(), **flat})
    loaded = load_safetensors(shared_file)
    model = fresh(gpt)
    model.load_state_dict({key: loaded[key] for key in model.state_dict()})
    load_scaling_state(model, loaded)
    assert same(scaling_state(model), flat)


def test_load_scaling_state_takes_a_state_dict_too(gpt, trained):
    model = fresh(gpt)
    load_scaling_state(model, through_torch_save(trained.state_dict()))
    assert same(scaling_state(model), scaling_state(trained))


def test_names_do_not_depend_on_wrappers(gpt, trained):
    flat = scaling_state(trained)
    assert same(scaling_state(nn.DataParallel(trained)), flat)
    assert same(scaling_state(torch.compile(trained, backend="eager")), flat)
    model = nn.DataParallel(fresh(gpt))
    load_scaling_state(model, nn.DataParallel(trained).state_dict())
    assert same(scaling_state(model), flat)


def test_what_does_not_fit_is_named_and_changes_nothing(gpt, trained):
    flat, model = scaling_state(trained), fresh(gpt)
    before = scaling_state(model)
    lacking = {key: value for key, value in flat.items() if ".blocks.0.up." not in key}
    with pytest.raises(ConversionError, match=r"it lacks 'blocks.0.up'. Convert with the recipe and rules"):
        load_scaling_state(model, lacking)
    renamed = {key.replace("blocks.0", "block.0"): value for key, value in flat.items()}
    with pytest.raises(ConversionError, match=r"lacks 'blocks.0.down', 'blocks.0.up'; it has 'block.0.down', "):
        load_scaling_state(model, renamed)
    with pytest.raises(ConversionError, match=r"unknown here \(did you mean 'blocks.0.down'\?\)"):
        load_scaling_state(model, renamed)
    with pytest.raises(ConversionError, match=r"converted layers: it has 'blocks.2.down', 'blocks.2.up', unknown"):
        load_scaling_state(fresh(gpt, last=1), flat)
    other = fresh(gpt, recipes.DELAYED.with_(history=8))
    with pytest.raises(ShapeError, match=r"'blocks.0.up' has history \[3, 4\], expected \[3, 8\]; convert with"):
        load_scaling_state(other, flat)
    with pytest.raises(ShapeError, match=r"'blocks.2.down' has scale None, expected \[3\]"):
        load_scaling_state(model, {k: v for k, v in flat.items() if k != "narrowgauge.blocks.2.down.scale"})
    with pytest.raises(ConversionError, match=r"no scaling state in what was given: expected keys 'narrowgauge"):
        load_scaling_state(model, gpt().state_dict())
    with pytest.raises(ConversionError, match=r"Gpt has no converted layer that keeps scales between steps"):
        load_scaling_state(gpt(), flat)
    assert same(scaling_state(model), before)


def test_a_state_dict_with_another_history_is_refused(gpt, trained):
    model = fresh(gpt, recipes.DELAYED.with_(history=8))
    with pytest.raises(RuntimeError, match=r"'blocks.0.up' has history \[3, 4\], expected \[3, 8\]"):
        model.load_state_dict(trained.state_dict())
    model.load_state_dict(dict(trained.state_dict()))


def test_weights_without_state_start_the_scales_afresh_and_say_so_once(gpt, trained, run_steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained.load_state_dict(gpt(seed=3).state_dict())  # says nothing yet: state may still follow
    state = scaling_state(trained)
    assert all(not value.any() for key, value in state.items() if key.endswith((".history", ".scale")))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with pytest.warns(NarrowgaugeWarning, match=r"without their scaling state \(first: 'blocks.0.up'\)") as seen:
        losses = run_steps(trained, optimizer, 2)
    assert len(seen) == 1
    model, _ = convert(gpt(seed=3), DELAYED)
    assert losses == run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


def test_weights_then_state_is_silent_and_state_then_weights_is_not(gpt, trained, run_steps):
    weights, flat = dict(trained.state_dict()), scaling_state(trained)
    model = fresh(gpt)
    model.load_state_dict(weights)
    load_scaling_state(model, flat)
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    other = fresh(gpt)
    load_scaling_state(other, flat)
    other.load_state_dict(weights)
    with pytest.warns(NarrowgaugeWarning, match=r"call narrowgauge.load_scaling_state after loading"):
        run_steps(other, torch.optim.SGD(other.parameters(), lr=0.1), 1)


def test_a_partial_load_leaves_the_other_layers_alone(gpt, trained):
    before = scaling_state(trained)
    weight = trained.blocks[0].up.weight.detach().clone()
    trained.load_state_dict({"blocks.0.up.weight": weight}, strict=False)
    after = scaling_state(trained)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {f"narrowgauge.blocks.0.up.{field}" for field in ("history", "scale", "inv_scale")}


def test_stale_pending_state_is_forgotten_when_other_weights_are_loaded(gpt, trained):
    model = gpt()
    model.load_state_dict(trained.state_dict())
    model.load_state_dict(gpt(seed=5).state_dict())
    convert(model, DELAYED)
    assert not scaling_state(model)["narrowgauge.blocks.0.up.scale"].any()


def test_pending_state_that_does_not_fit_is_refused_and_leaves_the_model_plain(gpt, trained):
    model = gpt()
    model.load_state_dict(trained.state_dict())
    with pytest.raises(ShapeError, match=r"has history \[3, 4\], expected \[3, 1024\]"):
        convert(model, "delayed")
    assert type(model.blocks[0].up) is nn.Linear


def test_a_scale_for_a_site_that_is_not_converted_is_refused(gpt):
    model = gpt()
    recipe = recipes.STATIC.with_(scales={"blocks.0.upp:input": 0.5})
    with pytest.raises(ConversionError, match=r"scale to 'blocks.0.upp:input'.* did you mean 'blocks.0.up:input'"):
        convert(model, recipe)
    assert type(model.blocks[0].up) is nn.Linear


def test_revert_drops_the_state_from_the_metadata(trained):
    revert(trained)
    assert "narrowgauge" not in str(trained.state_dict()._metadata)


class _Counts(nn.Module):
    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self.loaded = True


class _ByName(nn.Linear, _Counts):
    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        named = {"missing_keys": missing_keys, "unexpected_keys": unexpected_keys, "error_msgs": error_msgs}
        super()._load_from_state_dict(state_dict, prefix, local_metadata=local_metadata, strict=strict, **named)


def test_a_linear_layer_of_the_programs_own_is_loaded_as_it_says():
    """It may name what it hands on, and have another class behind nn.Linear."""
    layer, weights = _ByName(4, 3), {"weight": torch.ones(3, 4)}
    assert layer.load_state_dict(weights, strict=False).missing_keys == ["bias"]
    assert layer.loaded
    assert torch.equal(layer.weight, weights["weight"])
