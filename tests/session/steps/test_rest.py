"""Steps between the recorded ones, left alone: what has a row is as if every step had one, and the program's own."""

import functools
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import (
    AROUND,
    Interrupted,
    Model,
    batch,
    compared,
    evaluated,
    made,
    notes,
    nothing_is_compiled,
    plain,
    run,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.session.selection.step_ranges import StepRanges

__all__ = ["nothing_is_compiled"]  # a fixture for each test here


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recorded_steps_and_those_around_them_have_rows(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    session, writer = compared(tmp_path, functools.partial(plain, device=device))
    assert list(writer.column("loss")) == AROUND
    seconds = writer.column("step_seconds")
    assert set(seconds) >= set(AROUND[1:])
    assert max(seconds[at] for at in (9, 19)) < 1.0  # of the step alone
    assert notes(session) == [
        "16 of 24 steps were left alone, as watch.scalars asks: they have no row, and what was not finite or skipped "
        "in them is not counted."
    ]
    assert session.facts()["watch"]["steps_left_alone"] == 16


def test_every_step_has_one_where_nobody_asks(tmp_path):
    _, session, writer = run(tmp_path, plain, "all")
    assert list(writer.column("loss")) == list(range(1, 25))
    assert not notes(session)
    assert "steps_left_alone" not in session.facts()["watch"]


def test_meanwhile_no_function_of_ours_runs_around_the_program_s(tmp_path):
    seen = []

    def program(losses):
        model, optimizer = made()
        model.up.register_forward_pre_hook(lambda *_: seen.append(len(nn.modules.module._global_forward_pre_hooks)))
        for number in range(1, 25):
            step(model, optimizer, number, losses)
            seen.append("step")

    _, session, _ = run(tmp_path, program)
    assert set(seen) == {0, "step"}  # a global hook would have torch take a longer way to each module
    assert session.updates.backwards == 2 * len(AROUND)


def test_evaluations_are_heard_and_are_of_their_step(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            step(model, optimizer, number, losses)
            with torch.no_grad():
                if number % 4 == 0:
                    losses += [F.mse_loss(model(batch(n)), batch(n)).item() for n in (100, 101)]

    session, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == [4, 8, 12, 16, 20, 24]
    assert session.facts()["watch"]["steps_left_alone"] == 16
    assert list(writer.column("loss")) == AROUND


def test_the_time_of_an_evaluation_meanwhile_is_taken_off_no_step(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            time.sleep(0.02)
            step(model, optimizer, number, losses)
            if number == 5:
                with torch.no_grad():
                    slow = model.up.register_forward_hook(lambda *_: time.sleep(0.3))
                    losses.append(F.mse_loss(model(batch(100)), batch(100)).item())
                    slow.remove()

    _, _, writer = run(tmp_path, program)
    seconds = writer.column("step_seconds")
    assert min(seconds.values()) >= 0.02
    assert seconds[9] < 0.3
    assert writer.column("clean")[9] == 1.0


def test_a_metric_of_a_batch_that_trains_is_no_evaluation(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            x = batch(number)
            y = model(x)
            loss = F.mse_loss(y, x)
            with torch.no_grad():
                losses.append(F.l1_loss(y.detach(), x).item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 14:
                losses.append(evaluated(model))

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == [14]


def test_steps_that_a_gradient_scaler_skips_are_counted(tmp_path):
    def program(losses):
        model, optimizer = made()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
        for number in range(1, 25):
            x = batch(number)
            loss = F.mse_loss(model(x), x) * (float("inf") if number in (5, 6, 20) else 1.0)
            scaler.scale(loss).backward()
            losses.append(str(loss.item()))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND
    assert session.facts()["skipped_steps"] == 3
    assert writer.column("skipped") == {20: 1.0}
    assert not session.updates.losses._scaled


def test_a_forward_that_raises_is_no_step(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            step(model, optimizer, number, losses)
            if number in (5, 9):
                with pytest.raises(RuntimeError):
                    model(torch.ones(3, 5))
                losses.append(evaluated(model))

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == [5, 9]
    assert list(writer.column("loss")) == AROUND


def test_an_evaluation_after_an_interrupt_is_heard(tmp_path):
    def program(losses):
        model = Interrupted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 25):
            step(model, optimizer, number, losses)
            if number == 5:
                model.stops = True
                with pytest.raises(KeyboardInterrupt):
                    model(batch(1))
                model.stops = False
                losses.append(evaluated(model))

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == [5]


def test_a_model_in_a_reentrant_checkpoint_is_left_alone_too(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            x = batch(number).requires_grad_()
            loss = F.mse_loss(checkpoint(model, x, use_reentrant=True), x.detach())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    _, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND


@pytest.mark.parametrize(
    ("watch", "rows"),
    [
        ({"steps": [[14, 14]]}, [1, 2, 13, 14, 15]),
        ({"steps": [[7, 12]]}, AROUND[:5]),
        ({"steps": [[40, None]]}, [1, 2]),
    ],
)
def test_recorded_are_those_that_the_settings_name(tmp_path, watch, rows):
    session, writer = compared(tmp_path, plain, watch=watch)
    assert list(writer.column("loss")) == rows
    unmet = [note for note in session.facts()["notes"] if "nothing was recorded" in note]
    assert [" made 24 steps" in note for note in unmet] == [True] * (watch["steps"] == [[40, None]])


def test_a_dumped_step_is_awaited(tmp_path):
    settings = tmp_path / "narrowgauge.toml"
    dumps = [f'[[dump]]\nsteps = [{at}]\nsites = ["up"]\n' for at in (15, 90)]
    settings.write_text('[watch]\nscalars = "recorded"\n' + "".join(dumps))
    model, optimizer = made()
    with ng.watch(model, out=tmp_path / "run", every=1000, config=settings):
        for number in range(1, 25):
            step(model, optimizer, number, [])
    found = ng.open_run(tmp_path / "run")
    assert list(found.scalars()["step"]) == [1, 2, 14, 15, 16]
    assert [path.name for path in (tmp_path / "run").glob("**/*.safetensors")] == ["step00000015-rank0.safetensors"]
    assert [note for note in found.meta["notes"] if "dump[1].steps" in note and "made 24 steps" in note]


def test_cadences_that_leave_nothing_between(tmp_path):
    session, writer = compared(tmp_path, plain, every=3)
    assert list(writer.column("loss")) == list(range(1, 25))
    assert not notes(session)
    session, writer = compared(tmp_path, plain, every=4)
    assert set(range(1, 25)) - set(writer.column("loss")) == {6, 10, 14, 18, 22}


def together(losses):
    model = Model()
    one, two = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.up, model.down))

    class Both:
        param_groups = one.param_groups

        def step(self):
            one.step(), two.step()

        def zero_grad(self):
            model.zero_grad()

    for number in range(1, 25):
        step(model, Both(), number, losses)


def test_where_several_optimizers_make_each_step_it_is_left_alone(tmp_path):
    _, writer = compared(tmp_path, together)
    assert list(writer.column("loss")) == AROUND


def test_another_model_that_is_trained_meanwhile_wakes(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.session.steps.cycle.AWAITED", 2)  # nor is the other one's turn awaited

    def program(losses):
        model, one = made()
        other, two = made(torch.optim.SGD)
        for number in range(1, 25):
            step(*((model, one) if number != 15 else (other, two)), number, losses)

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == [1, 2, 9, 10, 11, *range(15, 25)]
    assert notes(session)[1] == (
        'watch.scalars is "recorded", but what the program did about step 15 was not as before: each step has a row '
        "since."
    )


def test_another_optimizer_that_steps_meanwhile_wakes(tmp_path):
    def program(losses):
        model, one = made()
        two = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 25):
            step(model, one if number != 15 else two, number, losses)

    session, writer = compared(tmp_path, program, turns=True)
    assert list(writer.column("loss")) == [1, 2, 9, 10, 11, *range(16, 25)]
    assert "about step 16" in notes(session)[1]


def test_an_optimizer_that_is_made_meanwhile_is_looked_at_first(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            if number == 15:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            step(model, optimizer, number, losses)

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == [1, 2, 9, 10, 11, 15, 16, 19, 20, 21]
    assert len(notes(session)) == 1


@pytest.mark.parametrize("first", [1, 15])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_closures_are_left_alone_too(tmp_path, kind, first):
    """As Lightning has them, in each step; or from one of the steps between on."""

    def program(losses):
        model, optimizer = made(kind if first == 1 else torch.optim.AdamW)
        for number in range(1, 25):
            if number < first:
                step(model, optimizer, number, losses)
                continue

            def closure(number=number):
                optimizer.zero_grad()
                loss = F.mse_loss(model(batch(number)), batch(number))
                loss.backward()
                losses.append(loss.item())
                return loss

            optimizer.step(closure)

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND
    assert len(notes(session)) == 1


def test_a_step_without_any_call_of_a_model_counts(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            if number != 15:
                step(model, optimizer, number, losses)
                continue
            model.up.weight.square().sum().backward()  # a decay by hand
            optimizer.step()
            optimizer.zero_grad()

    _, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND


def test_a_step_without_any_backward_ends_it(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            if number != 15:
                step(model, optimizer, number, losses)
                continue
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == [1, 2, 9, 10, 11, *range(16, 25)]
    assert "about step 16 " in notes(session)[1]


def test_a_step_in_backward_that_comes_meanwhile_has_rows_soon(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        for number in range(1, 15):
            step(model, optimizer, number, losses)
        own = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: own[p].step())
        for number in range(15, 25):
            model.zero_grad()
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            losses.append(loss.item())

    compared(tmp_path, program)


def test_another_thread_that_goes_on_with_the_training(tmp_path):
    def program(losses):
        model, optimizer = made()

        def part(first, last):
            for number in range(first, last):
                step(model, optimizer, number, losses)

        part(1, 6)
        for first in (6, 15):
            thread = threading.Thread(target=part, args=(first, first + 9))
            thread.start()
            thread.join()
        part(24, 25)

    _, writer = compared(tmp_path, program)
    assert {9, 10, 11, 19, 20, 21} <= set(writer.column("loss"))


def test_a_thread_that_only_evaluates_changes_nothing(tmp_path):
    def program(losses):
        model, optimizer = made()

        def evaluate():
            losses.append(evaluated(model))

        for number in range(1, 25):
            step(model, optimizer, number, losses)
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    _, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND


def test_a_program_that_compiles_is_left_alone_as_well(tmp_path):
    def program(losses):
        model, optimizer = made()
        compiled = torch.compile(model, backend="eager")
        for number in range(1, 25):
            step(compiled, optimizer, number, losses)

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND
    assert session.steps.rest.steps == 16


def test_a_watch_in_the_process_leaves_nothing_behind(tmp_path):
    settings = tmp_path / "narrowgauge.toml"
    settings.write_text('[watch]\nscalars = "recorded"\n')
    model, optimizer = made()
    before, losses = torch.autograd.backward, []
    with ng.watch(model, out=tmp_path / "run", config=settings):
        for number in range(1, 15):
            step(model, optimizer, number, losses)
    assert torch.autograd.backward is before
    assert not nn.modules.module._global_forward_pre_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    found = ng.open_run(tmp_path / "run")
    assert list(found.scalars()["step"]) == [1, 2, 9, 10, 11]
    assert found.meta["steps"] == 14


@pytest.mark.parametrize(
    ("spans", "step", "every", "wanted"),
    [
        ((), 0, 1, 1),
        ((), 10, 10, 20),
        ([(0, 3), (25, None)], 3, 10, 30),
        ([(5, 7), (12, 14)], 7, 1, 12),
        ([(5, 7)], 7, 1, None),
        ([(11, 19)], 0, 10, None),
    ],
)
def test_the_next_step_of_ranges(spans, step, every, wanted):
    ranges = StepRanges(spans)
    assert ranges.next(step, every) == wanted
    later = (at for at in range(step + 1, 100) if at in ranges and at % every == 0)
    assert ranges.next(step, every) == next(later, None)
