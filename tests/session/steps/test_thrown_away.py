"""Gradients that a program throws away are none of the next step's; those that it takes twice are."""

from contextlib import suppress

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import narrowgauge as ng


def batch(step, scale=1.0):
    return scale * torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def made(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, **options)


def loss_of(model, x):
    return F.mse_loss(model(x), x)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "module"])
@pytest.mark.parametrize("clips", [True, False])
def test_a_batch_that_is_skipped_is_in_no_step(tmp_path, to_none, whose, clips):
    """Its gradients are too large, say; several in a row, and one after a microbatch that was good."""
    wanted = []
    with followed(tmp_path) as (session, writer):
        model, optimizer = made()
        zero = (optimizer if whose == "optimizer" else model).zero_grad
        for number in range(9):
            loss = loss_of(model, batch(number, 100.0 if number in (3, 4, 7) else 1.0))
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm > 10:
                zero(set_to_none=to_none)
                continue
            wanted.append((loss.item(), norm))
            optimizer.step()
            zero(set_to_none=to_none)
    assert list(writer.column("loss").values()) == pytest.approx([loss for loss, _ in wanted])
    assert list(writer.column("grad_norm").values()) == pytest.approx([norm for _, norm in wanted])
    assert set(writer.column("tokens").values()) == {8}
    assert set(writer.column("microbatches").values()) == {1}
    (note,) = [note for note in session.facts()["notes"] if "set to zero" in note]
    assert note.startswith("Gradients of 3 microbatches were")


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_is_thrown_away_also_where_the_next_models_call_comes_before(tmp_path, accumulated):
    """Many set gradients to zero between the loss and its backward."""
    wanted = []
    with followed(tmp_path) as (session, writer):
        model, optimizer = made()
        parts = 0
        for number in range(14):
            loss = loss_of(model, batch(number, 100.0 if number in (4, 6) else 1.0))
            if not parts:
                optimizer.zero_grad()
                losses = []
            loss.backward()
            losses.append(loss.item())
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            if norm > 10:
                parts = 0
                continue
            parts += 1
            if parts == accumulated:
                wanted.append((sum(losses), norm))
                parts = 0
                optimizer.step()
    assert list(writer.column("loss").values()) == pytest.approx([loss for loss, _ in wanted])
    assert list(writer.column("grad_norm").values()) == pytest.approx([norm for _, norm in wanted])
    assert set(writer.column("tokens").values()) == {8 * accumulated}
    assert set(writer.column("microbatches").values()) == {accumulated}
    (note,) = [note for note in session.facts()["notes"] if "set to zero" in note]
    thrown = {1: 2, 2: 3}[accumulated]  # with the good one before the second
    assert note.startswith(f"Gradients of {thrown} microbatches were")


def test_a_second_look_at_the_same_data_is_the_steps_wherever_gradients_are_set_to_zero(tmp_path):
    x, losses = batch(0), []
    with followed(tmp_path) as (session, writer):
        model, optimizer = made()
        for _ in range(2):
            loss = loss_of(model, x)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    assert writer.column("loss") == {1: pytest.approx(sum(losses))}
    assert session.facts()["notes"] == []


def test_a_second_look_at_the_same_data_is_the_steps_as_well(tmp_path):
    """As sharpness-aware minimization takes it."""
    x, losses = batch(0), []
    with followed(tmp_path) as (session, writer):
        model, optimizer = made()
        for again in (False, True):
            loss = loss_of(model, x)
            loss.backward()
            losses.append(loss.item())
            if not again:
                optimizer.zero_grad()
        optimizer.step()
    assert writer.column("loss") == {1: pytest.approx(sum(losses))}
    assert session.facts()["notes"] == []


def test_gradients_of_one_graph_that_are_taken_one_by_one_are_all_the_steps(tmp_path):
    """As methods against conflicting gradients take them."""
    with followed(tmp_path) as (session, writer):
        model, optimizer = made()
        y, kept = model(batch(0)), []
        losses = [y.square().mean(), (y - 1).abs().mean()]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            kept.append([p.grad.clone() for p in model.parameters()])
        for p, *grads in zip(model.parameters(), *kept, strict=True):
            p.grad = sum(grads)
        optimizer.step()
    assert writer.column("loss") == {1: pytest.approx(sum(loss.item() for loss in losses))}
    assert writer.column("microbatches") == {1: 2}
    assert session.facts()["notes"] == []


def test_gradients_that_another_optimizer_does_not_set_to_zero_stay(tmp_path):
    with followed(tmp_path) as (session, writer):
        critic, first = made(1)
        actor, second = made(2)
        a = loss_of(critic, batch(0))
        a.backward()
        second.zero_grad()
        b = loss_of(actor, batch(1))
        b.backward()
        first.step()
        second.step()
    assert next(iter(writer.column("loss").values())) == pytest.approx((a + b).item())
    assert session.facts()["notes"] == []


def test_an_accumulated_step_and_a_closure_are_as_they_were(tmp_path):
    with followed(tmp_path) as (session, writer):
        model, optimizer = made()
        losses = []
        for number in range(6):
            if number % 3 == 0:
                optimizer.zero_grad()
            loss = loss_of(model, batch(number))
            loss.backward()
            losses.append(loss.item())
            if number % 3 == 2:
                optimizer.step()
        slow = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure():
            slow.zero_grad()
            loss = loss_of(model, batch(9))
            loss.backward()
            losses.append(loss.item())
            return loss

        slow.step(closure)
    found = writer.column("loss")
    assert found[1] == pytest.approx(sum(losses[:3]))
    assert found[2] == pytest.approx(sum(losses[3:6]))
    assert found[3] == pytest.approx(losses[6])
    assert session.facts()["notes"] == []


class Interrupted(torch.optim.SGD):
    """Ctrl-C comes in its second step, when all hooks have been called."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise KeyboardInterrupt
        return super().step(closure)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise torch.OutOfMemoryError


class FailsOnCall(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise torch.OutOfMemoryError
        return super().forward(x)


@pytest.mark.parametrize("in_call", [False, True])
def test_a_step_that_is_tried_anew_in_smaller_pieces_of_the_same_batch_counts_once(tmp_path, in_call):
    """Out of memory in its second microbatch: what the first left is set to zero, and all of it done again."""
    wanted, first = [], FailsOnCall(16, 16)
    with followed(tmp_path) as (session, writer):
        model = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def accumulate(x, pieces, fails=False):
            total = 0.0
            for number, piece in enumerate(x.chunk(pieces)):
                first.fails = in_call and fails and number == 1
                out = model(piece)
                loss = F.mse_loss(Fails.apply(out) if fails and number == 1 else out, piece) / pieces
                loss.backward()
                total += loss.item()
            return total

        for step in range(8):
            x = batch(step)
            optimizer.zero_grad()
            try:
                total = accumulate(x, 2, fails=step in (2, 5))
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
                first.fails = False
                total = accumulate(x, 4)
            wanted.append(total)
            optimizer.step()
    assert list(writer.column("loss").values()) == pytest.approx(wanted)
    assert set(writer.column("tokens").values()) == {8}
    assert list(writer.column("microbatches").values()) == [2, 2, 4, 2, 2, 4, 2, 2]
    (note,) = [note for note in session.facts()["notes"] if "set to zero" in note]
    assert note.startswith("Gradients of 2 microbatches were")


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_that_was_interrupted_leaves_nothing_in_the_next_one(tmp_path, clips):
    torch.manual_seed(0)
    model, norms, weights = nn.Linear(16, 16), [], []
    optimizer = Interrupted(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=1):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 if clips else 100.0).item()
            before = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
            with suppress(KeyboardInterrupt):
                optimizer.step()
                norms.append(norm)
                weights.append(before)
    run = ng.open_run(tmp_path / "run")
    assert run.scalars("grad_norm")["grad_norm"].tolist() == pytest.approx(norms)
    assert run.scalars("param_norm")["param_norm"].tolist() == pytest.approx(weights)
    assert len(norms) == 3


def test_a_closure_that_was_interrupted_leaves_nothing_in_the_next_one(tmp_path):
    torch.manual_seed(0)
    model, losses = nn.Linear(16, 16), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with ng.watch(model, out=tmp_path / "run", every=1):
        for step in range(4):
            x, seen = torch.randn(8, 16), []

            def closure(x=x, seen=seen, step=step):
                if step == 1 and seen:
                    raise KeyboardInterrupt
                optimizer.zero_grad()
                loss = (model(x) - x).square().mean()
                loss.backward()
                seen.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()))
                return loss

            with suppress(KeyboardInterrupt):
                optimizer.step(closure)
                losses.append(seen[0])
    found = ng.open_run(tmp_path / "run").scalars()
    assert found["loss"].tolist() == pytest.approx([loss for loss, _ in losses])
    assert found["grad_norm"].tolist() == pytest.approx([norm for _, norm in losses])
    assert found["tokens"].tolist() == [8, 8, 8]


def test_a_scaled_loss_that_is_dropped_takes_its_graph_with_it(tmp_path):
    """Else the next forward would need room for its activations beside those of the loss that was not finite."""
    torch.manual_seed(0)
    model, scaler = torch.nn.Linear(16, 16), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, expected = torch.randn(8, 16), []
    with followed(tmp_path, every=1, judge="current", compiling=True) as (_, writer):
        for _ in range(3):
            out = model(x)
            dropped, memory = scaler.scale(out.sum()), StorageWeakRef(out.untyped_storage())
            del out, dropped
            assert memory.expired()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            (scaler.scale(loss) + scaler.scale(loss.sqrt())).backward()  # of products that nobody holds
            scaler.step(optimizer)
            scaler.update()
            expected.append(loss.item() + loss.sqrt().item())
    assert list(writer.column("loss").values()) == pytest.approx(expected)
    assert list(writer.column("loss_scale").values()) == [4.0] * 3
