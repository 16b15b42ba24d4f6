"""The training that is measured ends with the same bits as the one that is not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED
from narrowgauge.session.same_weights import SameWeightsProbe

from .programs import make_probe, watched
from .test_measured import Checkpointed, Stateful


def train(model: nn.Module, probe: SameWeightsProbe | None, *, steps: int = 5, accumulate: int = 2) -> list[Any]:
    """A loop with two microbatches, a gradient hook, dropout everywhere; everything that it leaves behind."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fired = []
    first = next(model.parameters())
    first.register_hook(lambda g: fired.append("gradient"))
    first.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    model.body[-1].register_full_backward_hook(lambda m, i, o: fired.append("backward"))
    for m in model.modules():
        if type(m) is nn.Linear:
            m.register_forward_hook(lambda m, i, o: fired.append("forward"))
    losses = []
    with watched(probe, model):
        for step in range(1, steps + 1):
            if probe is not None:
                probe.armed(step)
            for _ in range(accumulate):
                x = torch.randn(12, 16) * random.random() * np.random.rand()
                logits = model(x)
                loss = F.cross_entropy(F.dropout(logits, 0.1), torch.randint(16, (12,))) / accumulate
                loss.backward()
                losses.append(loss.detach())
            versions = [b._version for b in model.buffers()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    state = [
        *losses,
        *model.state_dict().values(),
        *(s for p in model.parameters() for s in optimizer.state[p].values()),
        torch.get_rng_state(),
    ]
    plain = [random.getstate(), np.random.rand(), fired, versions]
    plain += [getattr(model, name, None) for name in ("calls", "seen")]
    if hasattr(model, "cache"):
        state.append(model.cache)
    assert torch.overrides._get_current_function_mode_stack() == []
    return [state, plain]


@pytest.mark.parametrize("kind", ["stateful", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("real", [False, True])
def test_a_measured_run_is_bit_identical(kind: str, real: bool) -> None:
    seen = []
    for measured in (False, True):
        torch.manual_seed(1)
        model = Stateful() if kind == "stateful" else Checkpointed(kind.startswith("reentrant"))
        probe = None
        if measured:
            probe = make_probe(steps=(2, 4))
            if real:
                recipes = {"current": CURRENT, "delayed": DELAYED, "blockwise": BLOCKWISE}
                probe = SameWeightsProbe(recipes, (2, 4))
        seen.append(train(model, probe))
        if probe is not None:
            assert probe.notes == []
            assert sorted(row.step for _, row in probe.results) == sorted([2, 4] * (3 if real else 1))
    (state, plain), (measured_state, measured_plain) = seen
    assert plain == measured_plain
    for a, b in zip(state, measured_state, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_the_script_keeps_its_own_modes_and_functions() -> None:
    probe = make_probe(steps=(1,))
    probe.armed(1)
    model = nn.Linear(8, 6)
    before = (
        torch.Tensor.backward,
        torch.autograd.Function.apply.__func__.__code__,
        torch.amp.GradScaler.scale.__code__,
    )
    with watched(probe, model), torch.device("meta"):
        loss = model(torch.randn(4, 8, device="cpu")).sum()
        assert torch.empty(2).device.type == "meta"
        loss.backward()
    assert torch.empty(2).device.type == "cpu"
    after = (
        torch.Tensor.backward,
        torch.autograd.Function.apply.__func__.__code__,
        torch.amp.GradScaler.scale.__code__,
    )
    assert before == after
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_default_device_stays_at_the_bottom() -> None:
    probe = make_probe(steps=(1,))
    probe.armed(1)
    model = nn.Linear(8, 6)
    torch.set_default_device("cpu")
    try:
        with watched(probe, model):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
    finally:
        torch.set_default_device(None)
    assert probe.notes == []
    assert len(probe.results) == 1


def test_what_breaks_inside_never_reaches_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *args: Any) -> None: ...

        def put_on(self, module: nn.Module) -> None:
            module.register_buffer("junk", torch.ones(1))
            raise RuntimeError("no such kernel")

        def take_off(self, module: nn.Module) -> None: ...

    from .programs import Recipe

    probe = SameWeightsProbe({"broken": Recipe()}, (1,), variant=Broken)
    probe.armed(1)
    model = nn.Linear(8, 6)
    with watched(probe, model):
        model(torch.randn(4, 8)).square().mean().backward()
    assert probe.results == []
    assert probe.notes == ["broken was not measured at the same weights: RuntimeError: no such kernel"]
    assert dict(model.named_buffers()) == {}


def test_nothing_is_held_during_the_real_backward() -> None:
    import weakref

    probe = make_probe(steps=(1,))
    probe.armed(1)
    model = nn.Linear(8, 6)
    with watched(probe, model):
        logits = model(torch.randn(4, 8))
        gone = weakref.ref(logits)
        loss = F.cross_entropy(logits * 2, torch.zeros(4, dtype=torch.long))
        del logits
        seen = []
        loss.register_hook(lambda g: seen.append(gone()))
        loss.backward()
    assert seen == [None] or isinstance(seen[0], Tensor) is False
    assert probe.seconds > 0
