"""Real recipes: their scales, their windows, their numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.compute.nn import clock_of, convert
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED, STATIC
from narrowgauge.session.same_weights import SameWeightsProbe

from .programs import watched


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.lm_head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.down(F.gelu(self.up(x))))


def batches(n: int, growth: float = 1.3) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(4)
    # Growing inputs, so that a scale of the step before is visibly not this step's own.
    return [(torch.randn(24, 32, generator=g) * growth**i, torch.randint(16, (24,), generator=g)) for i in range(n)]


def train(
    probe: SameWeightsProbe | None, steps: int, model: nn.Module, scaler: Any = None, growth: float = 1.3
) -> list[nn.Module]:
    """A copy of the model before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    with watched(probe, model):
        for step, (x, y) in enumerate(batches(steps, growth), start=1):
            kept.append(copy.deepcopy(model))
            if probe is not None:
                probe.armed(step)
            loss = F.cross_entropy(model(x), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return kept


def loss_and_grad(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    model.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).double()


@pytest.mark.parametrize(
    "recipe", [CURRENT, BLOCKWISE, DELAYED, DELAYED.with_(name="one", initial="one"), STATIC], ids=lambda r: r.name
)
def test_the_numbers_are_those_of_the_recipe(recipe: Any) -> None:
    torch.manual_seed(1)
    probe = SameWeightsProbe({"it": recipe}, (4,))
    kept = train(probe, 4, Net())
    assert probe.notes == []
    ((name, row),) = probe.results
    base_loss, base_grad = loss_and_grad(copy.deepcopy(kept[3]), batches(4)[3])
    # By hand: convert a copy, feed it step 3 at the weights of step 3, end the step, then step 4 at those of step 4.
    twin, _ = convert(copy.deepcopy(kept[2]), recipe)
    if recipe.state != "none":
        loss_and_grad(twin, batches(4)[2])
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
        optimizer.step()
        assert clock_of(twin).step == 1
    with torch.no_grad():
        for p, q in zip(twin.parameters(), kept[3].parameters(), strict=True):
            p.copy_(q)
    loss, grad = loss_and_grad(twin, batches(4)[3])
    assert (name, row.step) == ("it", 4)
    assert row.loss == pytest.approx(base_loss, rel=1e-7)
    assert row.loss_gap_pct == pytest.approx(100 * (loss - base_loss) / base_loss, rel=1e-4, abs=1e-6)
    cosine = float(torch.dot(grad, base_grad) / grad.norm() / base_grad.norm())
    assert row.grad_cosine == pytest.approx(cosine, abs=1e-7)
    assert row.grad_norm_ratio == pytest.approx(float(grad.norm() / base_grad.norm()), rel=1e-6)
    assert {layer[0] for layer in row.layers} == set(dict(kept[0].named_parameters()))
    errors = [layer[2] for layer in row.layers]
    assert errors == sorted(errors, reverse=True)
    assert 0.9 < row.grad_cosine < 1.0


def test_delayed_scales_come_from_as_many_steps_as_the_recipe_remembers() -> None:
    torch.manual_seed(1)
    recipes = {f"{n}": DELAYED.with_(history=n) for n in (1, 4, 1024)}
    probe = SameWeightsProbe(recipes, (2, 7))
    train(probe, 7, Net(), growth=0.7)
    assert probe.notes == []
    gaps = {(name, row.step): row.loss_gap_pct for name, row in probe.results}
    assert gaps["1", 2] == gaps["4", 2] == gaps["1024", 2]
    # At step 7, four steps back is step 3: only the longest remembers steps 1 and 2, with their larger inputs.
    assert gaps["1", 7] == gaps["4", 7] != gaps["1024", 7]


def test_without_the_step_before_there_is_no_delayed_number() -> None:
    torch.manual_seed(1)
    probe = SameWeightsProbe({"current": CURRENT, "delayed": DELAYED}, (1, 3))
    train(probe, 3, Net())
    assert [(n, r.step) for n, r in probe.results] == [("current", 1), ("current", 3), ("delayed", 3)]
    assert probe.notes == ["delayed was not measured on step 1: the step before it left no scales."]


def test_a_scaled_loss_is_reported_unscaled() -> None:
    rows = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=256.0)):
        torch.manual_seed(1)
        probe = SameWeightsProbe({"blockwise": BLOCKWISE}, (2,))
        train(probe, 2, Net(), scaler)
        assert probe.notes == []
        rows.append(probe.results[0][1])
    plain, scaled = rows
    assert scaled.loss == plain.loss
    assert scaled.loss_gap_pct == pytest.approx(plain.loss_gap_pct, rel=1e-6)
    assert scaled.grad_cosine == pytest.approx(plain.grad_cosine, abs=1e-9)


def test_flops_are_counted_and_divided_among_linear_layers() -> None:
    torch.manual_seed(1)
    probe = SameWeightsProbe({"current": CURRENT}, (1,))
    train(probe, 1, Net())
    tokens = 24
    # The first layer's input needs no gradient: two gemms of 2 M N K instead of three.
    assert probe.flops["linear"] == {
        "up": 2 * 2 * tokens * 32 * 64,
        "down": 3 * 2 * tokens * 64 * 32,
        "lm_head": 3 * 2 * tokens * 32 * 16,
    }
    assert probe.flops["total"] == sum(probe.flops["linear"].values())
    assert sum(probe.flops["by_op"].values()) == probe.flops["total"]


def test_attention_is_counted_on_a_cpu_too() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 8, 4, 24).transpose(1, 2).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    probe = SameWeightsProbe({"current": CURRENT}, (1,))
    probe.armed(1)
    model = Attending()
    with watched(probe, model):
        model(torch.randn(2, 8, 32)).square().mean().backward()
    linear = 2 * 2 * 16 * 32 * 96
    # Two products forward; four backward, and the scores once more.
    assert probe.flops["total"] == linear + (2 + 5) * 2 * (2 * 4) * 8 * 8 * 8


def test_a_model_without_a_layer_to_convert_is_noted_once() -> None:
    torch.manual_seed(1)
    probe = SameWeightsProbe({"current": CURRENT}, (1, 2))
    model = nn.Sequential(nn.Conv1d(32, 16, 1), nn.Flatten())
    with watched(probe, model):
        for step in (1, 2):
            probe.armed(step)
            model(torch.randn(4, 32, 1)).square().mean().backward()
    assert probe.results == []
    assert len(probe.notes) == 1
    assert "ConversionError: Sequential has no linear layer to convert" in probe.notes[0]


def test_attention_flops_count_query_heads_whatever_they_share() -> None:
    from narrowgauge.session.same_weights.flops import attention_backward_flops, attention_flops

    q, shared = (2, 4, 16, 8), (2, 2, 12, 8)
    assert attention_flops(q, shared, shared) == 2 * 2 * (2 * 4) * 16 * 12 * 8
    assert attention_backward_flops(q, q, shared, shared) == 5 * 2 * (2 * 4) * 16 * 12 * 8
