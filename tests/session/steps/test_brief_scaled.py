"""Brief rows of a program with a gradient scaler: a loss is the one before it was scaled, as in a whole row."""

import functools
import math
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from tests.session.steps.alone import AROUND, Functions, Model, batch, made, notes, nothing_is_compiled, run
from tests.session.steps.test_brief import BETWEEN, EACH, IN_BRIEF
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.session.steps.backward_losses import NEAR

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

BAD = (5, 9, 10, 11, 20)  # steps with a gradient that is not finite: between recorded ones, in them and beside them


def as_in_whole_rows(tmp_path, program, lacks=(), **more):
    """The session and the writer of a program in brief: all that it has is as if each step had a whole row."""
    wanted, told, every = run(tmp_path, program, "all", **more)
    losses, session, writer = run(tmp_path, program, "loss", **more)
    assert losses == wanted
    for name in (
        "loss",
        "lr",
        "lr_0",
        "lr_1",
        "grad_norm",
        "tokens",
        "skipped",
        "loss_scale",
        "microbatches",
        "param_norm",
    ):
        there = {at: str(value) for at, value in writer.column(name).items()}
        assert there == {at: str(every.column(name)[at]) for at in there}, name
    for name in ("lr", "skipped", "loss", "loss_scale"):  # nor does anything lack
        assert set(every.column(name)) - set(writer.column(name)) <= set(lacks), name
    assert not set(lacks) & set(writer.column("loss"))
    for fact in ("steps", "skipped_steps"):
        assert session.facts().get(fact) == told.facts().get(fact)
    return session, writer


def scaler_of(kind=torch.amp.GradScaler, **more):
    return kind("cpu", **{"init_scale": 8.0, "growth_interval": 3, **more})


def trained(losses, backward, optimizer=torch.optim.SGD, scaler=scaler_of, parts=1, clips=False, bad=BAD, device="cpu"):
    """Steps of which those in `bad` are skipped: by `backward(scaler, loss)`, of so many `parts` each."""
    model = Model().to(device)
    optimizer, scaler = optimizer(model.parameters(), lr=0.01), scaler()
    for number in EACH:
        for part in range(parts):
            x = batch(number + part).to(device)
            loss = F.mse_loss(model(x), x) / parts
            if number in bad:
                loss.register_hook(lambda g: g * math.inf)  # its own is finite
            backward(scaler, loss)
            losses.append(loss.item())
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.param_groups[0]["lr"] = 0.01 / number
        optimizer.zero_grad()


def plainly(scaler, loss):
    scaler.scale(loss).backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_brief_row_has_the_loss_and_its_scale_and_says_what_was_skipped(tmp_path, parts, clips, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")

    def program(losses):
        scaler = functools.partial(torch.amp.GradScaler, device, init_scale=8.0, growth_interval=3)
        trained(losses, plainly, parts=parts, clips=clips, scaler=scaler, device=device)

    session, writer = as_in_whole_rows(tmp_path, program)
    assert list(writer.column("loss")) == list(writer.column("loss_scale")) == EACH
    assert list(writer.column("skipped")) == list(BAD)
    assert session.steps.rest.steps == len(BETWEEN)
    assert not notes(session)
    for at in BETWEEN:
        assert set(writer.scalars[at]) == IN_BRIEF | {"loss_scale"} | ({"skipped"} if at in BAD else set())
    assert len(set(writer.column("loss_scale").values())) > 2  # it grew, and fell


def held(scaler, loss):
    scaler.held = scaler.scale(loss)  # until there is another
    scaler.held.backward()


def of_a_list(scaler, loss):
    for scaled in scaler.scale([loss, 2 * loss]):
        scaled.backward(retain_graph=True)


def both_at_once(scaler, loss):
    torch.autograd.backward(scaler.scale((loss, 2 * loss)))


def one_after_the_other(scaler, loss):
    one, other = scaler.scale(loss), scaler.scale(3 * loss)
    other.backward(retain_graph=True)
    one.backward()


def dropped(scaler, loss):
    scaler.scale(3 * loss)
    scaler.scale(loss).backward()


def dropped_and_not_used(scaler, loss):
    scaler.scale(loss)
    loss.backward()


def kept_beside(scaler, loss):
    scaler.beside = scaler.scale(3 * loss)
    scaler.scale(loss).backward()


def with_a_penalty(scaler, loss):
    (scaler.scale(loss) + 3 * loss).backward()


def added(scaler, loss):
    (scaler.scale(loss) + scaler.scale(3 * loss)).backward()


def divided(scaler, loss):
    (scaler.scale(loss) / 3).backward()


def in_its_place(scaler, loss):
    scaled = scaler.scale(loss)
    scaled /= 3
    scaled.backward()


def twice(scaler, loss):
    scaled = scaler.scale(loss)
    scaled.backward(retain_graph=True)
    scaled.backward()


def of_a_vector(scaler, loss):
    scaler.scale(loss * torch.ones(3)).sum().backward()


def in_bf16(scaler, loss):
    scaler.scale(loss.bfloat16()).backward()


def in_float64(scaler, loss):
    scaler.scale(loss.double()).backward()


def with_a_dimension(scaler, loss):
    scaler.scale(loss.reshape(1, 1)).backward()


def by_two(scaler, loss):
    scaler.scale(scaler_of(init_scale=3.0).scale(loss)).backward()


def in_the_next_step(scaler, loss):
    other, before = getattr(scaler, "before", (scaler_of(init_scale=3.0), loss * 0.1))
    before.backward(retain_graph=True)
    scaler.before = other, other.scale(loss.detach().requires_grad_() * 0.7)
    scaler.scale(loss).backward()


def much_later(scaler, loss):
    first = scaler.scale(loss)
    for _ in range(3):
        scaler.scale(3 * loss).backward(retain_graph=True)
    first.backward()


def scaled_often(scaler, loss):
    for times in range(250):
        scaler.scale(times * loss)
    (scaler.scale(loss) / 3).backward()


def beside_what_is_not_scaled(scaler, loss):
    loss.backward(retain_graph=True)
    scaler.scale(loss).backward()


@pytest.mark.parametrize(
    "backward",
    [
        held,
        of_a_list,
        both_at_once,
        one_after_the_other,
        dropped,
        dropped_and_not_used,
        kept_beside,
        with_a_penalty,
        added,
        divided,
        in_its_place,
        twice,
        of_a_vector,
        in_bf16,
        in_float64,
        with_a_dimension,
        by_two,
        in_the_next_step,
        much_later,
        scaled_often,
        beside_what_is_not_scaled,
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_is_what_a_whole_row_has(tmp_path, backward, parts):
    session, _ = as_in_whole_rows(tmp_path, lambda losses: trained(losses, backward, parts=parts))
    assert session.steps.rest.steps == len(BETWEEN)


@pytest.mark.parametrize("backward", [held, one_after_the_other, divided, with_a_penalty, both_at_once, kept_beside])
def test_what_comes_now_and_then_is_known_as_well(tmp_path, backward):
    def program(losses):
        times = iter(range(100))
        trained(losses, lambda scaler, loss: (backward if next(times) % 4 == 3 else plainly)(scaler, loss))

    as_in_whole_rows(tmp_path, program)


@pytest.mark.parametrize("backward", [divided, in_its_place])
@pytest.mark.parametrize("scalars", ["all", "loss"])
def test_what_is_divided_once_it_is_scaled_is_a_loss_so_divided(tmp_path, backward, scalars):
    losses, _, writer = run(tmp_path, lambda losses: trained(losses, backward), scalars)
    assert list(writer.column("loss").values()) == pytest.approx([loss / 3 for loss in losses])
    assert list(writer.column("loss_scale")) == EACH


def switched_off():
    return scaler_of(enabled=False)


class Own(torch.amp.GradScaler):
    """As that of FSDP, which has a `scale` of its own."""

    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale


class Twofold(torch.amp.GradScaler):
    def scale(self, outputs):
        return super().scale(outputs) * 1.0


class Around(torch.amp.GradScaler):
    def scale(self, outputs):
        return super().scale(outputs)


@pytest.mark.parametrize("scaler", [switched_off, *(functools.partial(scaler_of, k) for k in (Own, Twofold, Around))])
def test_scalers_of_other_kinds(tmp_path, scaler):
    bad = () if scaler is switched_off else BAD
    session, writer = as_in_whole_rows(tmp_path, lambda losses: trained(losses, plainly, scaler=scaler, bad=bad))
    assert list(writer.column("loss")) == EACH
    assert list(writer.column("loss_scale")) == ([] if scaler is switched_off else EACH)
    assert session.steps.rest.steps == len(BETWEEN)


def test_several_scalers(tmp_path):
    def program(losses):
        other = scaler_of(init_scale=2.0)
        times = iter(range(100))

        def backward(scaler, loss):
            if next(times) % 3 == 0:
                other.scale(loss).backward(retain_graph=True)
            scaler.scale(loss).backward()

        trained(losses, backward)

    as_in_whole_rows(tmp_path, program)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_fused_optimizer_that_skips_by_itself(tmp_path, parts):
    def optimizer(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    session, writer = as_in_whole_rows(tmp_path, lambda losses: trained(losses, plainly, optimizer, parts=parts))
    assert list(writer.column("skipped")) == list(BAD)
    assert session.steps.rest.steps == len(BETWEEN)


@pytest.mark.parametrize(
    ("up", "down"),
    [((5,), ()), ((), (5,)), ((5,), (5,)), ((1,), (2,)), ((2,), (1,)), ((4, 9, 10, 11, 20), (5, 9, 10, 12, 19, 21))],
)
def test_a_scaler_skips_some_of_several_optimizers(tmp_path, up, down):
    """Those of each half of the model in these steps."""

    def program(losses):
        model = Model()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.up, model.down)]
        scaler = scaler_of()
        for number in EACH:
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            plainly(scaler, loss)
            losses.append(loss.item())
            for part, optimizer, bad in zip((model.up, model.down), optimizers, (up, down), strict=True):
                if number in bad:
                    part.weight.grad.fill_(math.inf)
                optimizer.param_groups[0]["lr"] = (0.01 if part is model.up else 0.02) / number
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()

    session, writer = as_in_whole_rows(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    skipped = sorted({*up, *down})
    assert list(writer.column("skipped")) == skipped
    assert len(writer.column("lr_1")) == len(EACH)
    _, session, _ = run(tmp_path, program, "recorded")
    assert session.facts()["skipped_steps"] == len(skipped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(tmp_path, dtype):
    def program(losses):
        model, optimizer = made()
        scaler = scaler_of(init_scale=2.0**16)
        for number in EACH:
            x = batch(number)
            with torch.autocast("cpu", dtype):
                loss = F.mse_loss(model(x), x)
                if number % 2:
                    loss = loss.to(dtype)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    session, _ = as_in_whole_rows(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)


def test_the_rate_of_a_skipped_step_is_the_one_that_it_ends_with(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        scaler = scaler_of()
        for number in EACH:
            x = batch(number)
            scaler.scale(F.mse_loss(model(x), x) * (math.inf if number in BAD else 1.0)).backward()
            optimizer.param_groups[0]["lr"] = 0.01 / number
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    _, writer = as_in_whole_rows(tmp_path, program)
    assert list(writer.column("lr").values()) == [0.01 / number for number in EACH]


@pytest.mark.parametrize("kind", ["functions", "operations"])
def test_modes_of_the_program_see_nothing_of_it(tmp_path, kind):
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def optimizer(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    def program(losses):
        with Functions(seen) if kind == "functions" else Operations():
            trained(losses, plainly, optimizer)

    seen = []
    program([])
    alone, seen[:] = list(seen), []
    _, _, writer = run(tmp_path, program, "loss")
    assert seen == alone
    assert list(writer.column("loss")) == list(writer.column("loss_scale")) == EACH


@pytest.mark.parametrize("backward", [plainly, held, dropped, kept_beside, one_after_the_other, with_a_penalty])
def test_no_graph_lives_longer_than_without(tmp_path, backward):
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = Kept()
            kept.add(ctx.kept)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy

    class Kept:
        pass

    def program(losses):
        kept.clear()

        def seen(scaler, loss):
            gone.append(len(kept))
            backward(scaler, Node.apply(loss))

        trained(losses, seen)

    kept, gone = weakref.WeakSet(), []
    program([])
    alone, gone[:] = list(gone), []
    run(tmp_path, program, "loss")
    assert gone == alone


def test_a_scaled_loss_may_be_swapped(tmp_path):
    def swapped(scaler, loss):
        scaled, other = scaler.scale(loss), loss * 1.0
        torch.utils.swap_tensors(scaled, other)
        scaled.backward(retain_graph=True)
        other.backward()

    as_in_whole_rows(tmp_path, lambda losses: trained(losses, swapped))


def test_of_what_is_scaled_and_dropped_little_is_kept(tmp_path):
    watch = {"scalars": "loss"}
    with followed(tmp_path, compiling=True, judge="current", watch=watch, every=1000) as (session, _):
        model, optimizer = made(torch.optim.SGD)
        scaler = scaler_of()
        for number in EACH:
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            for _ in range(1000 if number == 20 else 0):
                scaler.scale(loss)
            losses = session.updates.losses
            scaler.scale(loss * torch.ones(1000))
            assert not [before for _, before, *_ in losses.latest if before.numel() > 1]
            assert len(losses.latest) <= NEAR
            assert len(losses._scaled) <= NEAR
            loss.backward()
            assert len(losses._earlier) <= 1
            optimizer.step()
            optimizer.zero_grad()
    assert session.steps.rest.steps == 22


def test_a_backward_that_raises_leaves_a_step_without_a_loss(tmp_path):
    def program(losses):
        times = iter(range(1, 100))

        def backward(scaler, loss):
            if next(times) == 14:
                broken = loss * 1.0
                broken.register_hook(lambda g: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    scaler.scale(broken).backward()
            else:
                scaler.scale(loss).backward()

        trained(losses, backward, parts=2)

    _, writer = as_in_whole_rows(tmp_path, program, lacks=[7])
    assert 8 in writer.column("grad_norm")


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("scalars", ["loss", "recorded"])
def test_another_thread_that_goes_on_has_its_own_loss(tmp_path, scalars, called):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        scaler = scaler_of()

        def steps(first, last, called=True):
            for number in range(first, last):
                x = batch(number)
                y = model(x) if called else x @ model.up.weight.t() @ model.down.weight.t()
                loss = F.mse_loss(y, x)
                plainly(scaler, loss)
                losses.append(loss.item())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        steps(1, 15)
        thread = threading.Thread(target=steps, args=(15, 25, called))
        thread.start()
        thread.join()

    wanted, _, every = run(tmp_path, program, "all")
    losses, session, writer = run(tmp_path, program, scalars)
    assert losses == wanted
    assert session.facts()["steps"] == 24
    assert session.hearing.turn == 2
    assert 20 in writer.column("loss")
    for name in ("loss", "loss_scale"):
        assert writer.column(name) == {at: every.column(name)[at] for at in writer.column(name)}


def test_where_there_are_no_rows_between_a_loss_that_was_scaled_there_is_known(tmp_path):
    def program(losses):
        trained(losses, in_the_next_step)

    _, _, every = run(tmp_path, program, "all")
    _, _, writer = run(tmp_path, program, "recorded")
    assert list(writer.column("loss")) == AROUND
    assert writer.column("loss") == {at: every.column("loss")[at] for at in AROUND}
    assert writer.column("loss_scale") == {at: every.column("loss_scale")[at] for at in AROUND}


def test_the_scale_that_the_program_sets(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        scaler = scaler_of()
        for number in EACH:
            x = batch(number)
            scaler.scale(F.mse_loss(model(x), x)).backward()
            scaler.step(optimizer)
            scaler.update(float(number))
            optimizer.zero_grad()

    _, writer = as_in_whole_rows(tmp_path, program)
    assert list(writer.column("loss_scale").values()) == [8.0, *map(float, EACH[:-1])]
