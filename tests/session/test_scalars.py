"""The numbers of a step, each compared with what the same tensors give by hand."""

import math
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from tests.session.inline import followed
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from narrowgauge.session.tensors import movement


def norm(tensors):
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def train(model, optimizer, steps=4, micro=2, clip=None):
    """Plain training; returns by step the gradient norm, the weights' norm and the update's."""
    found = {}
    for step in range(1, steps + 1):
        for number in range(micro):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + number))
            (model(x) - x).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        gradient = norm([p.grad for p in model.parameters()])
        if clip:
            clip()
        optimizer.step()
        moved = [p.detach() - w for p, w in zip(model.parameters(), before, strict=True)]
        found[step] = gradient, norm(before), norm(moved) / norm(before)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_norms_and_the_update_ratio_are_those_of_the_program_s_tensors(tmp_path, kind):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    with followed(tmp_path, every=2) as (session, writer):
        wanted = train(model, kind(model.parameters(), lr=0.01))
    assert writer.column("grad_norm") == pytest.approx({step: row[0] for step, row in wanted.items()}, rel=1e-6)
    assert writer.column("param_norm") == pytest.approx({step: wanted[step][1] for step in (2, 4)}, rel=1e-6)
    assert writer.column("update_ratio") == pytest.approx({step: wanted[step][2] for step in (2, 4)}, rel=1e-5)
    assert session.facts()["watch"]["update_share"] == 1.0
    assert session.hearing.notes == []


def test_norms_of_two_optimizers_are_of_both(tmp_path):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    with followed(tmp_path, every=1) as (_, writer):
        first, second = (
            torch.optim.SGD(part.parameters(), lr=rate) for part, rate in zip(model, (0.1, 0.3), strict=True)
        )

        class Both:
            def step(self):
                first.step(), second.step()

            def zero_grad(self):
                model.zero_grad()

        wanted = train(model, Both())
    for number, name in enumerate(("grad_norm", "param_norm", "update_ratio")):
        assert writer.column(name) == pytest.approx({step: row[number] for step, row in wanted.items()}, rel=1e-5)
    assert set(writer.column("lr").values()) == set(writer.column("lr_0").values()) == {0.1}
    assert set(writer.column("lr_1").values()) == {0.3}


def test_of_more_weights_than_the_budget_a_share_tells_the_update(tmp_path, monkeypatch):
    monkeypatch.setattr(movement.Movement.__init__, "__defaults__", (0, 2000, None))
    model = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 16).to(memory_format=torch.preserve_format))
    with followed(tmp_path, every=1) as (session, writer):
        wanted = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = session.facts()["watch"]["update_share"]
    assert 0.05 < share < 0.13  # every 11th of 16912
    assert writer.column("param_norm") == pytest.approx({step: row[1] for step, row in wanted.items()}, rel=1e-6)
    assert writer.column("update_ratio") == pytest.approx({step: row[2] for step, row in wanted.items()}, rel=0.1)


def test_every_kth_element_is_taken_in_memory_order_whatever_the_strides():
    x = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert movement._every(x, 5, 7).tolist() == x.permute(0, 2, 3, 1).reshape(-1)[2::5].tolist()
    scattered = torch.arange(24.0)[::2]
    assert movement._every(scattered, 5, 7) is scattered
    assert movement._every(torch.ones(2), 11, 5).numel() == 1


@pytest.mark.parametrize("scaled", [False, True])
def test_the_loss_of_a_backward_of_several_is_their_sum(tmp_path, scaled):
    wanted = []
    with followed(tmp_path) as (session, writer):
        model = nn.Linear(8, 8)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            y = model(torch.full((4, 8), 1.0 + step))
            losses = [y.square().mean(), y.abs().sum()]
            wanted.append(sum(loss.item() for loss in losses))
            torch.autograd.backward(scaler.scale(losses) if scaled else losses)
            scaler.step(optimizer) if scaled else optimizer.step()
            scaler.update() if scaled else None
    assert list(writer.column("loss").values()) == pytest.approx(wanted)
    assert list(writer.column("microbatches").values()) == [1, 1, 1]
    assert list(writer.column("loss_scale").values()) == ([64.0] * 3 if scaled else [])
    assert not [note for note in session.facts()["notes"] if note.startswith("Backward")]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def scaler_of(how):
    """FSDP's does not call the `scale` that it overrides; nor does one of a program's own."""

    class Own(torch.amp.GradScaler):
        def scale(self, outputs):
            self._scale is None and self._lazy_init_scale_growth_tracker(outputs.device)
            return outputs * self._scale

    kind = {"FSDP's": ShardedGradScaler, "its own": Own}.get(how, torch.amp.GradScaler)
    return kind("cpu", init_scale=64.0)


def backward_of(scaler, a, b, how):
    """Called on what came of a scaler's products; how often."""
    if how == "sum":
        (scaler.scale(a) + scaler.scale(b)).backward()
    elif how == "mean of a sum":
        torch.stack([scaler.scale(a + b), scaler.scale(a + b)]).mean().backward()
    elif how == "part":
        (scaler.scale((a + b) * 2.0) / 2.0).backward()
    elif how in ("FSDP's", "its own"):
        scaler.scale(a + b).backward()
    else:
        one, other = scaler.scale(a), scaler.scale(b)
        one.backward(retain_graph=True)
        other.backward(retain_graph=True)
        if how == "again":
            one.backward()
            return 3
        return 2
    return 1


@pytest.mark.parametrize("how", ["sum", "mean of a sum", "part", "FSDP's", "its own", "one by one", "again"])
@pytest.mark.parametrize("made", ["before", "after"])
def test_the_loss_is_unscaled_whatever_becomes_of_a_scalers_products(tmp_path, how, made, one_rank):
    wanted, microbatches = [], 0
    early = scaler_of(how)
    with followed(tmp_path) as (_, writer):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = early if made == "before" else scaler_of(how)
        for step in range(3):
            y = model(torch.full((4, 8), 1.0 + step))
            a, b = y.square().mean(), y.abs().sum()
            microbatches = backward_of(scaler, a, b, how)
            wanted.append(a.item() + b.item() + (a.item() if how == "again" else 0.0))
            scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
    assert list(writer.column("loss").values()) == pytest.approx(wanted)
    assert list(writer.column("loss_scale").values()) == [64.0] * 3
    assert list(writer.column("microbatches").values()) == [microbatches] * 3


def test_a_loss_that_no_scaler_multiplied_is_its_own_beside_products(tmp_path):
    with followed(tmp_path) as (_, writer):
        model = nn.Linear(8, 8)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
        y = model(torch.ones(4, 8))
        scaled, loss = scaler.scale(y.square().mean()), y.abs().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    assert scaled.item() > 0.0
    assert writer.column("loss") == {1: pytest.approx(loss.item())}
    assert writer.column("loss_scale") == {}


def test_a_backward_of_no_number_beside_losses_is_told(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            y = model(torch.ones(4, 8))
            y.backward(torch.ones_like(y), retain_graph=True)
            y.sum().backward()
            optimizer.step()
    assert list(writer.column("loss")) == [1, 2]
    assert writer.column("microbatches") == {1: 2, 2: 2}
    assert (
        "Backward was called 2 of 4 times on something else than numbers (gradients that are handed on, say), which "
        "adds nothing to loss: that is of the other calls alone." in session.facts()["notes"]
    )


def test_a_backward_from_a_given_gradient_is_a_microbatch_without_a_loss(tmp_path):
    """Several before a step, one that fails, and some that are thrown away."""

    def fails(gradient):
        raise ValueError("a hook of the program's")

    with followed(tmp_path) as (session, writer):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for microbatches in (1, 3):
            for number in range(microbatches):
                y = model(torch.full((4, 8), 1.0 + number))
                y.backward(torch.ones_like(y))
            y = model(torch.ones(4, 8))
            y.register_hook(fails)
            with pytest.raises(ValueError, match="a hook"):
                y.backward(torch.ones_like(y))
            optimizer.step()
        for number in (9, 10):
            optimizer.zero_grad()
            y = model(torch.full((4, 8), float(number)))
            y.backward(torch.ones_like(y))
        optimizer.step()
    assert writer.column("microbatches") == {1: 1, 2: 3, 3: 1}
    assert writer.column("tokens") == {1: 4, 2: 12, 3: 4}
    assert writer.column("loss") == {}
    assert session.facts()["not_found"] == ["No loss was found: backward was called on no scalar."]
    (note,) = session.facts()["notes"]
    assert note.startswith("Gradients of 1 microbatch were set to zero")


def test_the_norm_of_a_clipping_program_is_its_own_from_before(tmp_path):
    model = nn.Linear(16, 16)
    with followed(tmp_path, every=1) as (_, writer):
        wanted = train(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            clip=lambda: [torch.nn.utils.clip_grad_norm_(p, 0.01) for p in model.parameters()],
        )
    assert writer.column("grad_norm") == pytest.approx({step: row[0] for step, row in wanted.items()}, rel=1e-5)


def _by_hand(parameters, limit):
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)


@pytest.mark.parametrize("clip", [clip_grad_norm_, _by_hand])
def test_a_clip_that_was_imported_by_name_is_heard(tmp_path, clip):
    model = nn.Linear(16, 16)
    with followed(tmp_path, every=1) as (_, writer):
        wanted = train(
            model, torch.optim.SGD(model.parameters(), lr=0.1), clip=lambda: clip(list(model.parameters()), 0.01)
        )
    assert writer.column("grad_norm") == pytest.approx({step: row[0] for step, row in wanted.items()}, rel=1e-5)


def test_what_a_program_has_put_in_the_place_of_clipping_returns_what_it_likes(tmp_path, monkeypatch):
    def clip(parameters, limit):
        for p in parameters:
            p.grad.clamp_(-limit, limit)
        return torch.tensor(7.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", clip)
    model = nn.Linear(16, 16)
    with followed(tmp_path, every=1) as (_, writer):
        wanted = train(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            clip=lambda: torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1e9),
        )
    assert writer.column("grad_norm") == pytest.approx({step: row[0] for step, row in wanted.items()}, rel=1e-5)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_clip_by_another_norm_is_not_taken_for_the_norm(tmp_path, by_name):
    model = nn.Linear(16, 16)

    def clip():
        if by_name:
            clip_grad_norm_(model.parameters(), 1e9, math.inf)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=math.inf)

    with followed(tmp_path, every=1) as (_, writer):
        wanted = train(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=clip)
    assert writer.column("grad_norm") == pytest.approx({step: row[0] for step, row in wanted.items()}, rel=1e-5)


def test_bfloat16_weights_are_measured_as_they_are_rounded(tmp_path):
    model = nn.Linear(16, 16).bfloat16()
    [nn.init.ones_(p) for p in model.parameters()]
    with followed(tmp_path, every=1) as (_, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # too little for any weight to move
        model(torch.ones(4, 16, dtype=torch.bfloat16)).sum().backward()
        gradient = norm([p.grad for p in model.parameters()])
        optimizer.step()
    assert writer.column("update_ratio") == {1: 0.0}
    assert writer.column("grad_norm")[1] == pytest.approx(gradient, rel=1e-5)  # not rounded to bfloat16 itself


def test_nothing_is_copied_in_steps_that_are_not_recorded(tmp_path, monkeypatch):
    def copied(*_):
        raise AssertionError

    monkeypatch.setattr(movement.Movement, "before", copied)
    model = nn.Linear(16, 16)
    with followed(tmp_path, every=100) as (session, writer):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert session.hearing.notes == []
    assert len(writer.column("grad_norm")) == 4


def test_tokens_per_second_and_memory(tmp_path):
    model = nn.Linear(16, 16)
    with followed(tmp_path, every=2) as (_, writer):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seconds, tokens = writer.column("step_seconds"), writer.column("tokens")
    assert writer.column("tokens_per_second") == {s: tokens[s] / seconds[s] for s in seconds}
    assert list(writer.column("memory_bytes")) == list(writer.column("peak_memory_bytes")) == [2, 4]
    for now, peak in zip(*(writer.column(n).values() for n in ("memory_bytes", "peak_memory_bytes")), strict=True):
        assert 10 << 20 < now < 1.1 * peak


class Slow(torch.utils.data.Dataset):
    """Rows that take their time, by a clock of the test's."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return 12

    def __getitem__(self, i):
        self.clock[0] += self.seconds
        return torch.ones(16)


def test_data_seconds_are_those_of_the_batches_a_step_trained_on(tmp_path, monkeypatch):
    import time

    clock, real = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0] + 1e-9 * real())
    model = nn.Linear(16, 16)
    with followed(tmp_path, compiling=True) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, x in enumerate(DataLoader(Slow(clock, 0.5), batch_size=2)):
            model(x).sum().backward()
            if number % 2:
                optimizer.step()
                with torch.no_grad():
                    for y in DataLoader(Slow(clock, 100.0), batch_size=12):
                        model(y)
    assert writer.column("data_seconds") == pytest.approx({1: 2.0, 2: 2.0, 3: 2.0}, abs=1e-3)
    assert not any("DataLoader" in note for note in session.facts()["notes"])


@pytest.mark.parametrize("loads", [(), ("ffcv",), ("ffcv", "nvidia.dali")])
def test_of_waiting_for_other_loaders_it_is_told_that_it_is_not_known(tmp_path, monkeypatch, loads):
    """A program that has none, and samples from a tensor perhaps, waits for nothing that anybody would look for."""
    for name in loads:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    model = nn.Linear(16, 16)
    with followed(tmp_path, compiling=True) as (session, writer):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert writer.column("data_seconds") == {}
    told = f"How long the program waits for its data is not known: batches of {' and '.join(loads)} are not heard."
    assert session.facts()["notes"] == ([told] if loads else [])
