"""A converted model in the loops that people write: autocast, accumulation, checkpointing, frozen weights."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from narrowgauge.compute import recipes
from narrowgauge.compute.nn import Fp8Linear, convert, revert, scaling_state
from narrowgauge.errors import ConversionError

DELAYED = recipes.DELAYED.with_(history=4)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def cosine(left, right):
    flat = [torch.cat([g.flatten().float() for g in grads.values()]) for grads in (left, right)]
    return torch.nn.functional.cosine_similarity(*flat, dim=0).item()


def backward(model, scale=1.0):
    model.zero_grad()
    tokens = torch.arange(48).reshape(4, 12)
    upstream = torch.randn(4, 12, 48, generator=torch.Generator().manual_seed(5))
    logits = model(tokens)
    logits.backward(upstream.to(logits.dtype) * scale)
    return logits.detach(), grads(model)


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_outputs_and_gradients_are_close_to_the_plain_model(gpt, recipe):
    plain, converted = gpt(dim=128), convert(gpt(dim=128), recipe)[0]
    (y, dw), (y8, dw8) = backward(plain), backward(converted)
    assert dw.keys() == dw8.keys()
    assert 0.99 < cosine(dw, dw8) < 0.99999
    assert 0.99 < cosine({"y": y}, {"y": y8}) < 0.999999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_those_of_the_plain_model(gpt, dtype, autocast):
    plain, converted = gpt().to(dtype), convert(gpt().to(dtype), "delayed")[0]
    seen = []
    for model in (plain, converted):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model.blocks[0].up(torch.randn(3, 5, 32, dtype=dtype))
            logits, gradients = backward(model)
        seen.append((hidden.dtype, logits.dtype, {name: g.dtype for name, g in gradients.items()}))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_kinds_of_master_weight_learn(gpt, run_steps, dtype):
    model, _ = convert(gpt().to(dtype), "delayed")
    losses = run_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 8)
    assert losses[-1] < 0.9 * losses[0]
    assert model.blocks[0].up.weight.dtype is dtype


def test_autocast_trains_like_the_plain_model(gpt, run_steps):
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    plain, converted = gpt(), convert(gpt(), "current")[0]
    losses = [run_steps(m, torch.optim.AdamW(m.parameters(), lr=1e-2), 6, context=autocast) for m in (plain, converted)]
    assert losses[0] != losses[1]
    assert torch.tensor(losses[0]).sub(torch.tensor(losses[1])).abs().max() < 0.05


def test_accumulated_microbatches_leave_one_history_entry(gpt, run_steps):
    model, _ = convert(gpt(), DELAYED)
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, micro=3)
    history = scaling_state(model)["narrowgauge.blocks.0.up.history"]
    assert (history[:, :2] > 0).all()
    assert not history[:, 2:].any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(gpt, run_steps, reentrant):
    def run(checkpointed):
        model, _ = convert(gpt(), DELAYED)
        if checkpointed:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        losses = run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 4)
        return losses, model.state_dict(), scaling_state(model)

    plain, checkpointed = run(False), run(True)
    assert plain[0] == checkpointed[0]
    for left, right in zip(plain[1:], checkpointed[1:], strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_frozen_layers_convert_and_stay_frozen(gpt, run_steps):
    model, _ = convert(gpt(), "delayed")
    model.blocks[0].requires_grad_(False)
    frozen = model.blocks[0].up.weight.detach().clone()
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert isinstance(model.blocks[0].up, Fp8Linear)
    assert torch.equal(model.blocks[0].up.weight, frozen)
    assert model.blocks[0].up.weight.grad is None


def test_a_shared_weight_gets_the_sum_of_both_gradients(gpt):
    def shared(model):
        model.blocks[1].up.weight = model.blocks[0].up.weight
        return model

    plain, converted = shared(gpt()), convert(shared(gpt()), "current")[0]
    (_, dw), (_, dw8) = backward(plain), backward(converted)
    assert cosine({"w": dw["blocks.0.up.weight"]}, {"w": dw8["blocks.0.up.weight"]}) > 0.99


def test_a_module_used_twice_counts_both_calls(gpt):
    model = gpt()
    model.blocks[2] = model.blocks[0]
    _, report = convert(model, "delayed")
    backward(model)
    assert {row.name: row.calls for row in report.converted} == {
        "blocks.0.up": 2, "blocks.0.down": 2, "blocks.1.up": 1, "blocks.1.down": 1
    }  # fmt: skip
    assert report.rows[0].aliases == ("blocks.2.up",)


def test_moving_and_casting_after_conversion_works(gpt, run_steps):
    model, _ = convert(gpt(), "delayed")
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    scales = scaling_state(model)
    assert model.to("cpu").bfloat16().blocks[0].up.weight.dtype is torch.bfloat16
    with torch.no_grad():
        assert model(torch.arange(8)[None]).dtype is torch.bfloat16
        assert model.half()(torch.arange(8)[None]).dtype is torch.float16
    assert all(torch.equal(scales[key], value) for key, value in scaling_state(model).items())
    model.float()
    assert torch.isfinite(torch.tensor(run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1))).all()


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_parametrization_after_conversion_works_and_blocks_revert(gpt):
    model, _ = convert(gpt(), "current")
    layer, x = model.blocks[0].up, torch.randn(4, 32)
    before = layer(x) - layer.bias
    parametrize.register_parametrization(layer, "weight", Double())
    assert torch.allclose(layer(x) - layer.bias, 2 * before, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConversionError, match=r"'blocks.0.up' became a ParametrizedFp8Linear after its conv.*undo"):
        revert(model)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    revert(model)
    assert type(layer) is nn.Linear


def test_an_ema_copy_evaluates_with_its_own_scales(gpt, run_steps):
    model, _ = convert(gpt(), DELAYED)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        run_steps(model, optimizer, 1, start=step)
        average.update_parameters(model)
    with torch.no_grad():
        assert torch.isfinite(average(torch.arange(8)[None])).all()
    history = scaling_state(average.module)["narrowgauge.blocks.0.up.history"]
    assert not history.any()  # it never trained


def test_evaluation_and_no_grad_forwards_write_nothing(gpt, run_steps):
    model, _ = convert(gpt(), DELAYED)
    run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    before = scaling_state(model)
    with torch.no_grad():
        model(torch.arange(40)[None])
    assert all(torch.equal(before[key], value) for key, value in scaling_state(model).items())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_trains_like_an_uncompiled_one(gpt, run_steps, compiled_first):
    model, plain = gpt(), gpt()
    if compiled_first:
        compiled = torch.compile(model, backend="eager")
        convert(compiled, DELAYED)
    else:
        compiled = torch.compile(convert(model, DELAYED)[0], backend="eager")
    convert(plain, DELAYED)
    losses = run_steps(compiled, torch.optim.AdamW(model.parameters(), lr=1e-2), 3)
    assert losses == run_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 3)
    found, expected = scaling_state(compiled), scaling_state(plain)
    assert expected
    assert all(torch.equal(found[key], value) for key, value in expected.items())
