"""Where a replay cannot be trusted there is a reason, and no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.session.same_weights import SameWeightsProbe

from .programs import make_probe, watched
from .test_measured import Double, mlp

early_double = Double.apply


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _several(model, x, y):
    logits = model(x)
    torch.autograd.backward([logits.square().mean(), logits.abs().mean()])


def _gradient(model, x, y):
    model(x).backward(torch.ones(12, 16))


def _not_scalar_one(model, x, y):
    torch.autograd.backward([model(x)], [torch.ones(12, 16)])


def _retain(model, x, y):
    model(x).square().mean().backward(retain_graph=True)


def _unrelated(model, x, y):
    model(x)
    w = nn.Parameter(torch.ones(3))
    (w * w).sum().backward()


def _grad_used(model, x, y):
    x = x.clone().requires_grad_()
    logits = model(x)
    (g,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    (F.cross_entropy(logits, y) + g.square().mean()).backward()


def _constant_changed(model, x, y):
    bias = torch.ones(16)
    loss = F.cross_entropy(model(x) + bias, y)
    bias.zero_()
    loss.backward()


def _input_changed(model, x, y):
    loss = F.cross_entropy(model(x), y)
    x.zero_()
    loss.backward()


def _earlier_loss(model, x, y):
    early = next(model.parameters()).square().sum()
    model(x)
    early.backward()


class Shifted(nn.Sequential):
    """Saves nothing of its input for the backward pass."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def _hidden_path(model, x, y):
    # A graph from before the model was called.
    w = next(model.parameters())
    early = w.square().sum()
    (F.cross_entropy(model(x), y) + early).backward()


def _shared_memory(model, x, y):
    running = torch.zeros(2)
    first = running[:1]
    loss = F.cross_entropy(model(x), y)
    running += loss.detach()
    (loss * (1 + first.sum())).backward()


def _mode(model, x, y):
    with Mode():
        F.cross_entropy(model(x), y).backward()


def _hidden_state(model, x, y):
    # The model's output depends on something that nobody but the script knows about.
    box = model.box
    box[0] += 1.0
    F.cross_entropy(model(x), y).backward()


def _gradient_hook(model, x, y):
    next(model.parameters()).register_hook(lambda g: g * 2)
    F.cross_entropy(model(x), y).backward()


def _backward_hook_on_loss(model, x, y):
    logits = model(x)
    logits.register_hook(lambda g: g * 3)
    F.cross_entropy(logits, y).backward()


def _data_assigned(model, x, y):
    logits = model(x)
    logits.data = logits.data * 2
    F.cross_entropy(logits, y).backward()


def _numpy_path(model, x, y):
    logits = model(x)
    weights = torch.from_numpy(logits.detach().numpy().copy()).softmax(-1)
    (logits * weights).sum().backward()


REFUSED = {
    "several tensors": (_several, "backward was called on several tensors at once"),
    "gradient argument": (_gradient, "backward was called with gradients, inputs, retain_graph or create_graph"),
    "gradient list": (_not_scalar_one, "backward was called with gradients, inputs, retain_graph or create_graph"),
    "retain_graph": (_retain, "backward was called with gradients, inputs, retain_graph or create_graph"),
    "unrelated loss": (_unrelated, "the loss does not depend on any call of the model that could be seen"),
    "earlier loss": (_earlier_loss, "the loss was not computed from the model's output where it can be seen"),
    "autograd.grad": (_grad_used, "the script calls torch.autograd.grad on the way to its loss"),
    "constant changed": (
        _constant_changed,
        "an input of add, shape (16,), was changed in place between its use and the end of backward",
    ),
    "input changed": (
        _input_changed,
        "an input of Shifted, shape (12, 16), was changed in place between its use and the end of backward",
    ),
    "hidden path": (
        _hidden_path,
        "the loss depends on a tensor with gradients that was computed where it cannot be seen",
    ),
    "shared memory": (
        _shared_memory,
        "the loss depends on a tensor that shares memory with one that the script wrote to",
    ),
    "function mode": (_mode, "the script runs under a torch function mode of its own (Mode)"),
    "hidden state": (_hidden_state, "computing the loss again gives another value"),
    "gradient hook": (_gradient_hook, "computing the gradients again gives others (relative difference"),
    "hook on the way": (_backward_hook_on_loss, "computing the gradients again gives others (relative difference"),
    "data assigned": (_data_assigned, "the script assigns to .data of a tensor on the way to its loss"),
}


class Boxed(nn.Sequential):
    """Every call adds the content of a box that grows with every call."""

    def __init__(self) -> None:
        super().__init__(mlp())
        object.__setattr__(self, "_box", None)

    @property
    def box(self) -> list[float]:
        return BOX

    def forward(self, x: Tensor) -> Tensor:
        BOX[0] += 1.0
        return super().forward(x) * BOX[0]


BOX = [0.0]


def run(
    program: Callable[..., None], model: nn.Module | None = None, steps: tuple[int, ...] = (1,)
) -> SameWeightsProbe:
    torch.manual_seed(2)
    model = model or mlp()
    probe = make_probe(steps=steps)
    with watched(probe, model):
        for step in range(1, max(steps) + 1):
            probe.armed(step)
            program(model, torch.randn(12, 16), torch.randint(16, (12,)))
            for p in model.parameters():
                p.grad = None
        probe.armed(max(steps) + 1)
    assert torch.overrides._get_current_function_mode_stack() == []
    return probe


@pytest.mark.parametrize("name", REFUSED)
def test_no_number_but_the_reason(name: str) -> None:
    program, why = REFUSED[name]
    model = {_hidden_state: Boxed, _input_changed: Shifted}.get(program, mlp)()
    probe = run(program, model)
    assert probe.results == []
    (note,) = probe.notes
    assert note.startswith("No comparison at the same weights from step 1 on: ")
    assert why in note


def test_a_probe_that_gave_up_stays_silent() -> None:
    probe = run(_retain, steps=(1, 2, 3))
    assert len(probe.notes) == 1
    assert not probe.armed(4)


def test_an_autograd_function_that_was_looked_up_early_is_followed() -> None:
    probe = run(lambda model, x, y: early_double(F.cross_entropy(model(x), y)).backward())
    assert probe.notes == []
    assert len(probe.results) == 1


def test_a_step_without_backward_is_noted() -> None:
    def program(model, x, y):
        loss = F.cross_entropy(model(x), y)
        torch.autograd.grad(loss, list(model.parameters()))

    probe = run(program, steps=(1, 2))
    assert probe.notes == [f"Step {i} was not measured: its loss was never given to backward." for i in (1, 2)]


def test_a_baseline_that_overflows_is_skipped_for_that_step_only() -> None:
    calls = []

    def program(model, x, y):
        calls.append(1)
        (F.cross_entropy(model(x), y) * (float("inf") if len(calls) == 1 else 1.0)).backward()

    probe = run(program, steps=(1, 2))
    assert probe.notes == ["Step 1 was not measured: the baseline's own loss or gradients are not finite."]
    assert [row.step for _, row in probe.results] == [2]


def test_numbers_that_left_the_tape_are_mentioned() -> None:
    probe = run(_numpy_path)
    assert len(probe.results) == 1
    assert len(probe.notes) == 1
    assert "reads values of the model's output on the host (numpy) before its loss is complete" in probe.notes[0]


def test_a_number_read_and_changed_by_hand_is_mentioned_from_the_second_time_on() -> None:
    def program(model, x, y):
        logits = model(x)
        scale = logits.abs().mean().item() * 0.5
        (F.cross_entropy(logits, y) * scale).backward()

    probe = run(program, steps=(1, 2))
    assert len(probe.results) == 2
    assert "reads values of the model's output on the host (item)" in probe.notes[0]


def test_logging_before_backward_is_not_mentioned() -> None:
    def program(model, x, y):
        loss = F.cross_entropy(model(x), y) + 0.01 * model(x).square().mean()
        loss.item()
        (loss / 4).backward()

    assert run(program, steps=(1, 2)).notes == []


def test_hooks_that_change_the_output_are_kept() -> None:
    model = mlp()
    model[0].register_forward_hook(lambda m, args, out: out * 0.5)
    probe = run(lambda m, x, y: F.cross_entropy(m(x), y).backward(), model)
    assert probe.notes == []
    assert len(probe.results) == 1


def test_gradients_that_are_used_up_inside_of_backward_are_noted() -> None:
    model = mlp()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    probe = run(lambda m, x, y: F.cross_entropy(m(x), y).backward(), model)
    assert len(probe.results) == 1
    assert probe.notes == ["The replayed gradients could not be checked: backward left none in the parameters."]


def test_an_optimizer_inside_of_backward_is_refused() -> None:
    model = mlp()

    def step(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    probe = run(lambda m, x, y: F.cross_entropy(m(x), y).backward(), model)
    assert probe.results == []
    assert "computing the loss again gives another value" in probe.notes[0]
