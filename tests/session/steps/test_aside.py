"""What is called without gradients between two steps: an evaluation's seconds are no step's, training's are."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.session.doors import calling
from narrowgauge.session.models import calls
from narrowgauge.session.steps import aside, laps, ledger


class Ticks(nn.Module):
    """A model each of whose calls takes 10 seconds."""

    def __init__(self, now):
        super().__init__()
        self.inner, self.now = nn.Linear(4, 4), now

    def forward(self, x):
        self.now[0] += 10.0
        return self.inner(x)

    def __deepcopy__(self, memo):
        other = Ticks(self.now)
        other.inner = copy.deepcopy(self.inner, memo)
        return other


@pytest.fixture
def now(monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (laps, ledger, calls, aside, calling):
        monkeypatch.setattr(module, "time", clock)
    return now


def seconds_of(tmp_path, now, between):
    """`step_seconds` and `clean` of steps that take 10 seconds and what `between` does before each but the first."""
    model = Ticks(now)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ng.watch(out=tmp_path / "run", every=100):
        for step in range(4):
            x = torch.randn(8, 4)
            if step:
                between(model, x)
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    table = ng.open_run(tmp_path / "run").scalars(["step_seconds", "clean"])
    (seconds,), (clean,) = (set(table[name][1:].tolist()) for name in ("step_seconds", "clean"))
    return seconds, clean


@torch.no_grad()
def evaluated(model, *batches):
    for x in batches:
        F.mse_loss(model(x), x)


def test_an_evaluation_of_an_averaged_copy_is_no_time_of_a_step(tmp_path, now):
    """A diffusion model is evaluated by its averaged copy alone."""
    averaged = Ticks(now)
    seconds = seconds_of(tmp_path, now, lambda model, x: evaluated(averaged, torch.randn(8, 4), torch.randn(8, 4)))
    assert seconds == (10.0, 0.0)


def test_nor_is_what_the_copy_computed_before_its_loss(tmp_path, now):
    """Two calls for one loss, and something in between."""
    averaged = Ticks(now)

    @torch.no_grad()
    def between(model, x):
        x = averaged(torch.randn(8, 4))
        now[0] += 5.0
        F.mse_loss(averaged(x), x)

    assert seconds_of(tmp_path, now, between) == (10.0, 0.0)


def test_beside_the_models_own_each_counts_once(tmp_path, now):
    averaged = Ticks(now)

    def between(model, x):
        for each in (model, averaged):
            evaluated(each, torch.randn(8, 4), torch.randn(8, 4))

    assert seconds_of(tmp_path, now, between) == (10.0, 0.0)


@pytest.mark.parametrize("metric", [False, True])
def test_a_teachers_call_is_the_steps(metric, tmp_path, now):
    """Also where the teacher's own loss is computed of the batch that its pupil learns from."""
    teacher = Ticks(now).requires_grad_(False)

    @torch.no_grad()
    def between(model, x):
        y = teacher(x)
        if metric:
            F.mse_loss(y, x)

    assert seconds_of(tmp_path, now, between) == (20.0, 1.0)


@pytest.mark.parametrize("mode", [True, False])
def test_so_is_one_that_was_trained_before_in_the_same_run(mode, tmp_path, now):
    """A distillation whose first half trains the teacher; what its pupil does not learn from is an evaluation."""
    teacher, pupil = Ticks(now), Ticks(now)
    with ng.watch(out=tmp_path / "run", every=100):
        for model in (teacher, pupil):
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            for _ in range(4):
                x = torch.randn(8, 4)
                with torch.no_grad():
                    if model is pupil:
                        teacher.train(mode)(torch.randn(8, 4))
                        y = teacher(x)
                    else:
                        y = x
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    table = ng.open_run(tmp_path / "run").scalars(["step_seconds", "clean"])
    assert table["step_seconds"].tolist()[1:] == [10.0] * 3 + [20.0] * 4
    assert table["clean"].tolist()[1:] == [1.0] * 3 + [0.0] * 4


def test_an_evaluation_on_the_batch_that_the_same_model_trains_on_next_teaches_nobody(tmp_path, now):
    """All nodes of a graph, whose accuracy is no loss. Another model trains on them after that."""
    model, other = Ticks(now), Ticks(now)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 1e-3)
    x = torch.randn(8, 4)
    with ng.watch(out=tmp_path / "run", every=100):
        for _ in range(4):
            with torch.no_grad():
                model.eval()(x)
            F.mse_loss(model.train()(x), other(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    table = ng.open_run(tmp_path / "run").scalars(["step_seconds", "clean"])
    assert (table["step_seconds"][1:].tolist(), table["clean"][1:].tolist()) == ([20.0] * 3, [0.0] * 3)


def test_gradient_cachings_first_pass_is_the_steps(tmp_path, now):
    """Chunks are called without gradients, and again with them."""

    def between(model, x):
        with torch.no_grad():
            reps = torch.cat([model(chunk) for chunk in x.split(4)]).requires_grad_()
        reps.square().mean().backward()
        for chunk, gradient in zip(x.split(4), reps.grad.split(4), strict=True):
            torch.autograd.backward([model(chunk)], [gradient])

    assert seconds_of(tmp_path, now, between) == (50.0, 1.0)


class Returns(Ticks):
    """Returns a loss beside what it made, as Hugging Face's models."""

    def forward(self, x, labels=None):
        y = super().forward(x)
        return {"y": y, **({} if labels is None else {"loss": F.mse_loss(y, labels)})}


def references(tmp_path, now, what, config=None):
    """A run of steps in each of which the model is called once more without gradients, between forward and backward."""
    model = Returns(now)
    called = model
    if "wrapped" in what:  # what is trained is called through it, the reference without
        called = nn.DataParallel(model)
        called.device_ids = []  # also where there are GPUs
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ng.watch(out=tmp_path / "run", every=100, config=config):
        for _ in range(4):
            x, labels = torch.randn(8, 4), torch.randn(8, 4)
            y = called(x=x, labels=labels)["y"]
            loss = F.softplus(y).mean()
            if what == "behind backward":
                loss.backward()
            with torch.no_grad():
                called.train(what != "eval")
                if what == "written":
                    labels.add_(1.0)
                again = x.clone() if "other" in what else x
                reference = model(x=again, labels=labels)["y"]
                if "measured" in what:
                    F.l1_loss(reference, labels)
                called.train()
            if what != "behind backward":
                (loss + (y - reference).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ng.open_run(tmp_path / "run")


METRICS = "4 losses were computed without gradients of batches that train (a metric, say); eval_loss leaves them out."


@pytest.mark.parametrize("what", ["itself", "wrapped"])
def test_a_reference_beside_the_batch_that_trains_is_the_steps_and_no_evaluation(what, tmp_path, now):
    """DPO with LoRA: the model without its adapters, which returns a loss of its labels that nobody asks for."""
    run = references(tmp_path, now, what)
    assert "eval_loss" not in run.scalar_names
    table = run.scalars(["step_seconds", "clean"])
    assert (set(table["step_seconds"].tolist()), set(table["clean"].tolist())) == ({20.0}, {1.0})
    assert METRICS in run.meta["notes"]


@pytest.mark.parametrize("what", ["measured", "wrapped, measured"])
def test_what_is_computed_of_a_reference_by_torchs_loss_functions_is_no_evaluation_either(what, tmp_path, now):
    run = references(tmp_path, now, what)
    assert "eval_loss" not in run.scalar_names
    assert METRICS.replace("4", "8", 1) in run.meta["notes"]


@pytest.mark.parametrize("what", ["behind backward", "eval", "other rows", "written", "wrapped, other rows"])
def test_what_is_no_batch_that_waits_for_its_backward_is_evaluated(what, tmp_path, now):
    run = references(tmp_path, now, what)
    table = run.scalars(["step_seconds", "clean", "eval_loss"])
    made = table["step"] > 0  # an evaluation in the first step is before it
    assert (set(table["step_seconds"][made].tolist()), set(table["clean"][made].tolist())) == ({10.0}, {0.0})
    assert METRICS not in run.meta["notes"]


def test_a_program_with_a_reference_has_a_row_of_each_step(tmp_path, now):
    """While it is left alone nobody knows which batch trains."""
    settings = tmp_path / "recorded.toml"
    settings.write_text('[watch]\nscalars = "recorded"\n')
    run = references(tmp_path, now, "itself", settings)
    assert run.scalars("loss")["step"].tolist() == [1, 2, 3, 4]
    (note,) = (note for note in run.meta["notes"] if "watch.scalars" in note)
    assert "calls its model without gradients on batches that it trains on: each step has a row" in note


@pytest.mark.parametrize("what", ["a loss", "eval", "other rows", "written"])
def test_an_evaluation_on_what_is_trained_on_is_none_of_the_step(what, tmp_path, now):
    """A graph is evaluated on all of its nodes, which the next step is given as well."""

    @torch.no_grad()
    def between(model, x):
        model.train(what != "eval")
        y = model(x[:4] if what == "other rows" else x)
        model.train()
        if what == "a loss":
            F.mse_loss(y, x)
        if what == "written":
            x.add_(1.0)

    assert seconds_of(tmp_path, now, between) == (10.0, 0.0)


def test_what_no_step_came_of_is_not_the_next_ones(tmp_path, now):
    """Called again one step later, it was an evaluation of the step before."""
    kept = torch.randn(8, 4)

    def between(model, x):
        F.mse_loss(model(kept), kept).backward()
        with torch.no_grad():
            model(torch.randn(8, 4))
            model(kept)

    assert seconds_of(tmp_path, now, between) == (20.0, 0.0)


class Slow:
    """A dataset each of whose rows takes a second."""

    def __init__(self, now):
        self.now = now

    def __len__(self):
        return 64

    def __getitem__(self, at):
        self.now[0] += 1.0
        return torch.randn(4)


@pytest.mark.parametrize("what", ["nothing", "evaluation", "averaged copy", "teacher", "gradient caching", "targets"])
def test_a_batch_is_waited_for_by_the_step_that_trains_on_it_and_by_no_evaluation(what, tmp_path, now):
    """Four rows for each step, and eight for each evaluation. Targets' own call counts as one, its batch does not."""
    model, other = Ticks(now), Ticks(now).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    rows, more = (iter(DataLoader(Slow(now), batch_size=size)) for size in (4, 8))
    with ng.watch(out=tmp_path / "run", every=100):
        for _ in range(4):
            x = next(rows)
            if what == "teacher":
                evaluated(other, x)
            if what == "targets":  # what the model says of the next states of the same batch
                with torch.no_grad():
                    model(x + 1.0)
            if what == "gradient caching":
                with torch.no_grad():
                    y = model(x).requires_grad_()
                y.square().mean().backward()
                torch.autograd.backward([model(x)], [y.grad])
            else:
                F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if what in ("evaluation", "averaged copy"):
                evaluated(model if what == "evaluation" else other, next(more), next(more))
    table = ng.open_run(tmp_path / "run").scalars(["step_seconds", "data_seconds"])
    assert set(table["data_seconds"].tolist()) == {4.0}
    calls = 2 if what in ("teacher", "gradient caching") else 1
    assert set(table["step_seconds"][1:].tolist()) == {4.0 + 10.0 * calls}


def test_what_was_waited_for_in_the_step_before_is_not_taken_off_the_next(tmp_path, now):
    """A program has its next batch before it steps, and evaluates then."""
    model = Ticks(now)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    rows, more = (iter(DataLoader(Slow(now), batch_size=size)) for size in (4, 8))
    with ng.watch(out=tmp_path / "run", every=100):
        x = next(rows)
        for _ in range(4):
            F.mse_loss(model(x), x).backward()
            x = next(rows)
            optimizer.step()
            optimizer.zero_grad()
            evaluated(model, next(more))
    assert ng.open_run(tmp_path / "run").scalars("step_seconds")["step_seconds"][1:].tolist() == [14.0] * 3


def test_what_was_waited_for_between_two_calls_for_one_loss_is_taken_off_once(tmp_path, now):
    averaged, more = Ticks(now), iter(DataLoader(Slow(now), batch_size=8))

    @torch.no_grad()
    def between(model, x):
        F.mse_loss(averaged(next(more)), averaged(next(more)))

    def trained(model, x):
        between(model, x)
        now[0] += 30.0

    assert seconds_of(tmp_path, now, trained) == (40.0, 0.0)


def test_an_evaluation_before_the_last_optimizer_was_made_is_before_the_first_step(tmp_path, now):
    model, teacher = Ticks(now), Ticks(now)
    with ng.watch(out=tmp_path / "run", every=100):
        _first = torch.optim.SGD(model.parameters(), 1e-3)
        evaluated(teacher, torch.randn(8, 4), torch.randn(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        F.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 4)).backward()
        optimizer.step()
    table = ng.open_run(tmp_path / "run").scalars(["step_seconds", "clean"])
    assert (table["step_seconds"].tolist(), table["clean"].tolist()) == ([10.0], [1.0])
