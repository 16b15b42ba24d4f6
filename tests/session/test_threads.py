"""A training that moves from thread to thread is recorded whole; trainings of several threads are not mixed."""

import asyncio
import gc
import os
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.session.inline import followed
from tests.session.same_weights.programs import make_probe
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowgauge.session.models import roots
from narrowgauge.session.steps import same_training
from narrowgauge.session.steps.laps import Laps

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
BATCHES = [torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)) for rows in range(2, 10)]
TOLD = ["Several threads of the program train; only the first is followed."]


def linear():
    torch.manual_seed(0)
    return nn.Linear(16, 16)


class Training:
    """A training whose steps can be made in any thread, and what a run should have of it."""

    def __init__(self, model=None, lr=0.1):
        self.model = linear() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.losses, self.norms, self.inputs, self.threads = [], [], [], []

    def step(self, x=X):
        self.optimizer.zero_grad()
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.norms.append(float(torch.cat([p.grad.flatten() for p in self.model.parameters()]).norm()))
        self.optimizer.step()
        self.losses.append(loss.item())
        self.inputs.append(x)
        self.threads.append(threading.get_ident())

    def is_whole(self, session, writer):
        steps = range(1, len(self.losses) + 1)
        assert session.facts()["steps"] == len(self.losses)
        assert list(writer.column("loss")) == list(steps)
        assert list(writer.column("loss").values()) == pytest.approx(self.losses, rel=1e-6)
        assert list(writer.column("grad_norm").values()) == pytest.approx(self.norms, rel=1e-6)
        assert writer.column("microbatches") == dict.fromkeys(steps, 1)
        assert writer.column("tokens") == {step: len(x) for step, x in zip(steps, self.inputs, strict=True)}
        assert session.hearing.notes == []


def amaxes(writer):
    """The largest value of each input that was recorded, by step."""
    return {
        step: float(columns["amax"][at])
        for step, sites, columns in writer.tensors
        for at, site in enumerate(sites)
        if site.endswith(":input")
    }


class Turns:
    """Has each job run in another thread of a pool than the one before: that one is held until the next has run."""

    def __init__(self, jobs):
        self.jobs, self.done = jobs, [threading.Event() for _ in jobs]

    def run(self, number):
        try:
            self.jobs[number]()
        finally:
            self.done[number].set()
        if number + 1 < len(self.jobs):
            assert self.done[number + 1].wait(60)


def in_turns(*jobs):
    turns = Turns(jobs)
    with ThreadPoolExecutor(2) as pool:
        futures = []
        for number in range(len(jobs)):
            futures.append(pool.submit(turns.run, number))
            assert turns.done[number].wait(60)
        for future in futures:
            future.result()


class Worker:
    """A thread that has a job done and is waited for, or only begins it."""

    def __init__(self, pool):
        self.begins = pool.submit

    def __call__(self, job):
        return self.begins(job).result(60)


@pytest.fixture
def workers():
    """Threads that stay: `workers[0](job)` has it done in the first."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two, ThreadPoolExecutor(1) as three:
        yield [Worker(pool) for pool in (one, two, three)]


def elsewhere(job):
    """Have it done in a thread of its own, which ends."""
    raised = []

    def run():
        try:
            job()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


# ------------------------------------------------------------------------------ one training, many threads


@pytest.mark.parametrize("recipe", [None, "current"])
def test_epochs_in_a_pool_of_workers_are_one_training(tmp_path, recipe):
    with followed(tmp_path, every=1, judge="current", recipe=recipe) as (session, writer):
        training = Training()

        def epoch(number):
            for x in BATCHES[2 * number : 2 * number + 2]:
                training.step(x)

        in_turns(*(lambda number=number: epoch(number) for number in range(4)))
    training.is_whole(session, writer)
    assert training.threads[1] != training.threads[2]
    assert amaxes(writer) == {step: pytest.approx(float(x.abs().max())) for step, x in enumerate(training.inputs, 1)}


def test_steps_that_asyncio_gives_to_threads_are_one_training(tmp_path):
    with followed(tmp_path, every=2, judge="current") as (session, writer):
        training = Training()
        turns = Turns([lambda x=x: training.step(x) for x in BATCHES])

        async def main():
            tasks = []
            for number, done in enumerate(turns.done):
                tasks.append(asyncio.create_task(asyncio.to_thread(turns.run, number)))
                while not done.is_set():
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks)

        asyncio.run(main())
    training.is_whole(session, writer)
    assert len(set(training.threads)) > 1
    assert list(amaxes(writer)) == [2, 4, 6, 8]
    assert set(writer.column("update_ratio")) == {2, 4, 6, 8}


def test_a_training_is_heard_while_another_thread_compiles(tmp_path):
    inside, done = threading.Event(), threading.Event()

    def backend(graph, examples):  # the compiler's: torch says in every thread that something is compiled
        inside.set()
        assert done.wait(60)
        return graph.forward

    with followed(tmp_path, compiling=True) as (session, writer):
        training = Training()
        training.step()
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(torch.compile(lambda x: x + 1, backend=backend), X)
            try:
                assert inside.wait(60)
                assert torch.compiler.is_compiling()
                training.step()
                training.step(BATCHES[0])
            finally:
                done.set()
            assert torch.equal(compiled.result(60), X + 1)
        training.step()
    training.is_whole(session, writer)


def test_a_warm_up_in_the_main_thread_and_the_rest_in_a_worker_are_one_training(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()
        training.step()
        elsewhere(lambda: [training.step(x) for x in BATCHES])
        training.step()
    training.is_whole(session, writer)
    assert len(set(training.threads)) == 2


def test_what_the_main_thread_prepares_and_looks_at_does_not_keep_a_worker_from_being_followed(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()
        training.optimizer.zero_grad()
        training.model(X[:3])  # its shapes, with gradients on
        training.optimizer.zero_grad()
        elsewhere(lambda: [training.step(x) for x in BATCHES])
    training.is_whole(session, writer)


def test_a_wrapper_around_the_model_that_was_followed_is_the_same_training(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()
        training.step()
        training.model = nn.Sequential(training.model)
        elsewhere(training.step)
        training.step()
    training.is_whole(session, writer)


def test_a_checkpointed_model_is_followed_from_thread_to_thread(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()
        inner = training.model
        training.model = lambda x: checkpoint(inner, x, use_reentrant=True)
        training.model.parameters = inner.parameters
        wanting = [x.clone().requires_grad_() for x in BATCHES]
        in_turns(*(lambda x=x: training.step(x) for x in wanting))
    training.is_whole(session, writer)


def test_a_microbatch_that_fails_in_one_thread_and_is_tried_in_another_counts_once(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()
        works = training.model

        def fails():
            hook = works.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                training.step()
            hook.remove()

        in_turns(training.step, fails, lambda: training.step(BATCHES[0]), fails, lambda: training.step(BATCHES[1]))
    training.is_whole(session, writer)


def test_a_batch_that_is_skipped_in_one_thread_is_in_no_step_of_another(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()

        def skipped():
            training.model(BATCHES[3]).square().mean().backward()
            training.optimizer.zero_grad()

        in_turns(training.step, skipped, lambda: training.step(BATCHES[0]))
    training.is_whole(session, writer)


def test_steps_of_bare_parameters_are_known_by_what_the_loss_was_made_of(tmp_path):
    with followed(tmp_path) as (session, writer):
        w = nn.Parameter(torch.eye(16))
        optimizer = torch.optim.SGD([w], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses = []

        def step():
            loss = (X @ w.t() - 2 * X).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())

        in_turns(step, step, step)
    assert list(writer.column("loss").values()) == pytest.approx(losses, rel=1e-6)
    assert writer.column("loss_scale") == {1: 1024.0, 2: 1024.0, 3: 1024.0}
    assert session.hearing.notes == []


def test_a_backward_that_fails_in_one_thread_does_not_hide_what_is_trained_from_the_next(tmp_path):
    with followed(tmp_path) as (session, writer):
        w = nn.Parameter(torch.eye(16))
        optimizer = torch.optim.SGD([w], lr=0.1)
        losses = []

        def step():
            optimizer.zero_grad()
            loss = (X @ w.t() - 2 * X).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        def fails():
            handle = w.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step()
            handle.remove()

        in_turns(step, fails, step)
    assert list(writer.column("loss").values()) == pytest.approx(losses, rel=1e-6)
    assert writer.column("microbatches") == {1: 1, 2: 1}
    assert session.hearing.notes == []


def test_steps_without_a_loss_are_known_by_their_optimizer(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()

        in_turns(step, step, step)
    assert writer.column("grad_norm") == {step: pytest.approx(272**0.5) for step in (1, 2, 3)}
    assert session.hearing.notes == []


def test_closures_are_followed_from_thread_to_thread(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = (model(X) - X).square().mean()
            loss.backward()
            losses[-1].append(loss.item())
            return loss

        def step():
            losses.append([])
            optimizer.step(closure)

        in_turns(step, step, step)
    assert list(writer.column("loss").values()) == pytest.approx([first for first, *_ in losses], rel=1e-6)
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert session.hearing.notes == []


def test_a_compiled_step_is_followed_from_thread_to_thread(tmp_path):
    with followed(tmp_path, compiling=True) as (session, writer):
        training = Training(nn.Sequential(linear()))
        model = training.model
        compiled = torch.compile(lambda x: model(x), backend="eager")
        training.model = lambda x: compiled(x)
        training.model.parameters = model.parameters
        in_turns(*[training.step] * 3)
    training.is_whole(session, writer)


def test_a_function_that_is_compiled_between_threads_is_followed(tmp_path):
    with followed(tmp_path, compiling=True) as (session, writer):
        training = Training(nn.Sequential(linear()))
        model = training.model
        compiled = torch.compile(lambda x: model(x), backend="eager")

        def step_of_the_compiled():
            training.model = lambda x: compiled(x)
            training.model.parameters = model.parameters
            training.step()

        in_turns(training.step, step_of_the_compiled, training.step)
    training.is_whole(session, writer)


def test_two_networks_that_train_in_turn_move_together(tmp_path):
    with followed(tmp_path) as (session, writer):
        makes, judges = linear(), nn.Linear(16, 1)
        optimizers = [torch.optim.SGD(net.parameters(), lr=lr) for net, lr in ((judges, 0.1), (makes, 0.2))]

        def both():
            with torch.no_grad():
                made = makes(X)
            judges(made).mean().backward()
            optimizers[0].step()
            judges(makes(X)).mean().backward()
            optimizers[1].step()

        in_turns(both, both, both)
    assert list(writer.column("lr").values()) == [0.1, 0.2] * 3
    assert writer.column("tokens") == dict.fromkeys(range(1, 7), 8)
    assert session.hearing.notes == []


def test_what_a_thread_waited_for_is_in_its_own_first_step(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()

        def epoch():
            session.loading.batch_loaded(0.25, None)
            training.step()

        training.step()  # with a batch that nobody loaded
        in_turns(epoch, epoch)
    assert writer.column("data_seconds") == {2: 0.25, 3: 0.25}


def test_times_are_taken_between_events_of_one_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device, kept in ((0, True), (1, False)):
        laps = Laps()
        laps._before = SimpleNamespace(device=torch.device("cuda", device))
        laps.hand_over()  # the next thread has device 0
        assert (laps._before is not None) == kept


def test_an_evaluation_counts_in_the_thread_that_made_the_last_step(tmp_path):
    with followed(tmp_path) as (_, writer):
        training = Training()

        def epoch(shift):
            training.step()
            with torch.no_grad():
                nn.functional.mse_loss(X, X + shift + 0 * training.model(X).sum())

        in_turns(lambda: epoch(1), lambda: epoch(2), lambda: epoch(3))
    assert list(writer.column("eval_loss").values()) == pytest.approx([1.0, 4.0, 9.0], rel=1e-5)


def test_a_thread_is_not_taken_for_one_that_ended_and_had_its_number(tmp_path):
    with followed(tmp_path) as (session, writer):
        w = nn.Parameter(torch.eye(16))
        optimizer = torch.optim.SGD([w], lr=0.1)
        training, numbers, losses = Training(lr=0.7), [], []

        def step():
            optimizer.zero_grad()
            loss = (X @ w).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            numbers.append(threading.get_ident())

        def other():
            training.step()

        step()
        for _ in range(10):
            elsewhere(step)
            elsewhere(other)  # which would be followed in its place, had it its number
    assert writer.column("lr") == dict.fromkeys(range(1, 12), 0.1)
    assert list(writer.column("loss").values()) == pytest.approx(losses, rel=1e-6)
    assert session.hearing.notes == TOLD
    if not set(numbers) & set(training.threads):
        pytest.skip("the system gave no number twice")


def test_threads_that_ended_are_not_kept(tmp_path):
    class Large:
        """What a thread was given."""

    with followed(tmp_path):
        training = Training()
        known = []

        def step(large):
            known.append(weakref.ref(large))
            known.append(weakref.ref(threading.current_thread()))
            training.step()

        for _ in range(3):
            thread = threading.Thread(target=lambda large: step(large), args=(Large(),))
            thread.start()
            thread.join()
            del thread
        gc.collect()
        assert [each() for each in known] == [None] * 6


# ------------------------------------------------------------------------------ several threads at once


def test_between_its_steps_a_training_is_not_taken_for_another_one(tmp_path, workers):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        training, other = Training(), Training(lr=0.7)
        for x in BATCHES:
            training.step(x)
            workers[0](other.step)
            elsewhere(other.step)
    assert set(writer.column("lr").values()) == {0.1}
    assert list(writer.column("loss").values()) == pytest.approx(training.losses, rel=1e-6)
    assert writer.column("tokens") == {step: len(x) for step, x in enumerate(BATCHES, 1)}
    assert session.hearing.notes == TOLD


def test_a_training_beside_another_one_is_still_followed_from_thread_to_thread(tmp_path, workers):
    with followed(tmp_path) as (session, writer):
        training, other = Training(), Training(lr=0.7)
        w = nn.Parameter(torch.eye(16))
        bare = torch.optim.SGD([w], lr=0.9)

        def without_a_model():
            (X @ w).square().mean().backward()
            bare.step()

        training.step()
        for x in BATCHES:
            workers[0](other.step)
            workers[1](without_a_model)
            workers[2](lambda x=x: training.step(x))
            workers[0](other.step)
            elsewhere(lambda x=x: training.step(x))  # a thread that ends does not leave its place to anybody
            workers[0](other.step)
            training.step(x)
    assert set(writer.column("lr").values()) == {0.1}
    assert list(writer.column("loss").values()) == pytest.approx(training.losses, rel=1e-6)
    assert session.hearing.notes == TOLD


def test_models_that_were_followed_in_turn_are_told_apart_when_they_train_at_once(tmp_path, workers):
    with followed(tmp_path) as (session, writer):
        training, other = Training(), Training(lr=0.7)
        other.step()
        training.step()
        for _ in range(3):
            workers[0](training.step)
            workers[1](other.step)
    assert list(writer.column("lr").values()) == [0.7, *[0.1] * 4]
    assert session.hearing.notes == TOLD


def test_of_two_threads_that_train_one_model_at_once_the_first_is_followed(tmp_path, workers):
    with followed(tmp_path) as (session, writer):
        training = Training()
        training.step()
        seconds = torch.optim.SGD(training.model.parameters(), lr=0.7)

        def second():
            training.model(X[:1]).square().mean().backward()
            seconds.step()

        loss = training.model(X).square().mean()
        workers[0](second)  # in the middle of a step
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        for _ in range(2):
            workers[0](second)  # and between two
            training.step()
    assert writer.column("lr") == {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.1}
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8, 4: 8}
    assert writer.column("microbatches") == {1: 1, 2: 1, 3: 1, 4: 1}
    assert session.hearing.notes == TOLD


def test_a_thread_that_began_between_another_s_steps_gives_the_training_back(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()
        second = torch.optim.SGD(training.model.parameters(), lr=0.7)
        training.step()
        begun, go_on = threading.Event(), threading.Event()

        def beside():
            training.model(X[:1]).square().mean().backward()
            begun.set()
            assert go_on.wait(60)
            second.step()

        thread = threading.Thread(target=beside)
        thread.start()
        assert begun.wait(60)
        training.step()
        go_on.set()
        thread.join()
        training.step()
    assert writer.column("lr") == {1: 0.1, 2: 0.1, 3: 0.1}
    assert list(writer.column("loss").values()) == pytest.approx(training.losses, rel=1e-6)
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert writer.column("microbatches") == {1: 1, 2: 1, 3: 1}
    assert session.hearing.notes == TOLD


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_an_evaluation_in_another_thread_is_no_training(tmp_path, workers, gradients, ends):
    with followed(tmp_path) as (session, writer):
        training = Training()

        def evaluate():
            with torch.set_grad_enabled(gradients):
                nn.functional.mse_loss(training.model(X[:3]), X[:3])

        for x in BATCHES:
            training.step(x)
            (elsewhere if ends else workers[0])(evaluate)
    training.is_whole(session, writer)
    assert not writer.column("eval_loss")


def test_an_evaluation_that_runs_beside_the_training_is_not_taken_for_it(tmp_path):
    with followed(tmp_path) as (session, writer):
        training = Training()
        running, go_on = threading.Event(), threading.Event()

        def slow(module, args):
            if len(args[0]) == 1:
                running.set()
                assert go_on.wait(60)

        training.model.register_forward_pre_hook(slow)
        training.step()
        thread = threading.Thread(target=lambda: training.model(X[:1]))  # with gradients on, it may be anything
        thread.start()
        assert running.wait(60)
        training.step()
        go_on.set()
        thread.join()
        training.step()
    assert list(writer.column("loss").values()) == pytest.approx(training.losses, rel=1e-6)
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert not session.calls.running


@pytest.mark.parametrize("every", [1, 10])
def test_who_steps_is_followed_and_not_who_called_the_model_first(tmp_path, every):
    with followed(tmp_path, every=every) as (_, writer):
        training = Training()
        running, go_on = threading.Event(), threading.Event()

        def slow(module, args):
            if len(args[0]) == 1:
                running.set()
                assert go_on.wait(60)

        training.model.register_forward_pre_hook(slow)
        thread = threading.Thread(target=lambda: training.model(X[:1]))  # evaluates, with gradients on by mistake
        thread.start()
        assert running.wait(60)
        training.step()
        training.step()
        go_on.set()
        thread.join()
        training.step()
    assert list(writer.column("lr")) == [1, 2, 3]
    assert list(writer.column("loss")) == [2, 3]  # the first was known by its optimizer alone
    assert list(writer.column("loss").values()) == pytest.approx(training.losses[1:], rel=1e-6)
    assert writer.column("tokens") == {2: 8, 3: 8}
    assert set(amaxes(writer)) <= {2, 3}


def test_an_evaluation_within_a_step_does_not_keep_the_training_in_its_thread(tmp_path, workers):
    with followed(tmp_path) as (session, writer):
        training, jobs = Training(), []
        training.model.register_forward_pre_hook(lambda *_: jobs.pop()() if jobs else None)
        for number in range(18):
            if number in (2, 9):
                jobs.append(lambda: workers[2](lambda: training.model(X[:1])))  # with gradients on, by mistake
            workers[number % 2](training.step)
    assert list(writer.column("loss").values()) == pytest.approx(training.losses, rel=1e-6)
    assert writer.column("tokens") == dict.fromkeys(range(1, 19), 8)
    assert session.hearing.notes == TOLD


def test_after_a_look_that_was_followed_the_training_still_moves(tmp_path, workers):
    with followed(tmp_path) as (_, writer):
        training = Training()
        workers[2](lambda: training.model(X[:1]))
        for p in training.model.parameters():
            p.grad = torch.zeros_like(p)
        workers[0](training.optimizer.step)  # all that is heard of the first step
        for number in range(6):
            workers[number % 2](training.step)
    assert list(writer.column("loss")) == [2, 3, 4, 5, 6, 7]
    assert list(writer.column("loss").values()) == pytest.approx(training.losses, rel=1e-6)


@pytest.mark.parametrize("slower", [1, 3])
def test_a_slower_thread_that_trains_the_same_at_once_is_not_taken_for_one_that_goes_on(tmp_path, workers, slower):
    with followed(tmp_path) as (session, writer):
        training, kept, jobs = Training(), [], []
        second = torch.optim.SGD(training.model.parameters(), lr=0.7)
        training.model.register_forward_hook(lambda *_: jobs.pop()() if jobs else None)

        def begins():
            kept.append(training.model(X[:1]).square().mean())

        def ends():
            kept.pop().backward()
            second.step()

        training.step()
        for _ in range(2):
            jobs.append(lambda: workers[0](begins))
            for _ in range(slower):
                training.step()
            workers[0](ends)
        workers[0](begins)  # between two steps
        training.step()
        workers[0](ends)
        training.step()
    assert writer.column("lr") == dict.fromkeys(range(1, 4 + 2 * slower), 0.1)
    assert set(writer.column("tokens").values()) == {8}
    assert session.hearing.notes == TOLD


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at as it goes on
def test_a_worker_goes_on_while_the_thread_that_trained_before_evaluates(tmp_path, workers):
    with followed(tmp_path, compiling=True) as (session, writer):
        training = Training(nn.Sequential(linear()))

        @torch.compiler.disable
        def meanwhile():
            if not torch.is_grad_enabled():
                workers[0](training.step)

        model = training.model

        @torch.compile(backend="eager")
        def call(x):
            y = model(x)
            meanwhile()
            return y

        training.model = lambda x: call(x)
        training.model.parameters = model.parameters
        training.step()
        with torch.no_grad():
            call(X)
        workers[0](training.step)
    training.is_whole(session, writer)


class Fixed(nn.Module):
    """Has its inputs in it."""

    def __init__(self, meanwhile):
        super().__init__()
        self.layer, self.meanwhile = linear(), meanwhile

    def forward(self):
        y = self.layer(X)
        self.meanwhile()
        return y.square().mean()


def test_a_model_that_is_being_called_is_not_left_for_another_thread(tmp_path, workers):
    with followed(tmp_path) as (session, writer):
        jobs = []
        model = Fixed(lambda: jobs and workers[0](jobs.pop()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []

        def step():
            optimizer.zero_grad()
            loss = model()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        step()
        jobs.append(lambda: model())
        step()
        step()
    assert list(writer.column("loss").values()) == pytest.approx(losses, rel=1e-6)
    assert writer.column("microbatches") == {1: 1, 2: 1, 3: 1}
    assert session.hearing.notes == TOLD


def test_within_a_closure_no_other_thread_is_followed(tmp_path, workers):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []

        def closure():
            if losses:
                workers[0](lambda: model(X[:3]))  # before the closure has called anything itself
            optimizer.zero_grad()
            losses.append((model(X) - X).square().mean())
            losses[-1].backward()
            return losses[-1]

        for _ in range(3):
            optimizer.step(closure)
    assert list(writer.column("loss").values()) == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert session.hearing.notes == TOLD


def test_who_trains_something_else_is_not_searched_at_each_step(tmp_path, workers, monkeypatch):
    searched, search = [], same_training._made_of
    monkeypatch.setattr(same_training, "_made_of", lambda *args: searched.append(1) or search(*args))
    with followed(tmp_path):
        training = Training()
        w = nn.Parameter(torch.eye(16))
        bare = torch.optim.SGD([w], lr=0.9)

        def without_a_model():
            (X @ w).square().mean().backward()
            bare.step()

        for _ in range(5):
            training.step()
            workers[0](without_a_model)
    assert len(searched) == 1


def test_a_thread_that_begins_to_train_while_the_first_is_about_to_is_not_followed(tmp_path, workers, monkeypatch):
    with followed(tmp_path) as (session, writer):
        training, other = Training(), Training(lr=0.7)
        hashed = roots.weights_hash

        def slowly(weights):  # what is done to a model before its first step takes a while
            monkeypatch.setattr(roots, "weights_hash", hashed)
            workers[0](other.step)
            return hashed(weights)

        monkeypatch.setattr(roots, "weights_hash", slowly)
        training.step()
        training.step()
    assert writer.column("lr") == {1: 0.1, 2: 0.1}
    assert writer.column("tokens") == {1: 8, 2: 8}
    assert session.hearing.notes == TOLD


def test_many_threads_that_train_at_once_disturb_nothing(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        trainings = [Training(lr=lr) for lr in (0.1, 0.2, 0.3)]
        begun, whole = threading.Event(), threading.Barrier(3)

        def train(training):
            if training is trainings[0]:
                training.step()
                begun.set()
            assert begun.wait(60)
            for x in BATCHES * 5:
                training.step(x)
            whole.wait(60)  # the place of a thread that has ended is free

        threads = [threading.Thread(target=train, args=(training,)) for training in trainings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert writer.column("lr") == dict.fromkeys(range(1, 42), 0.1)
    assert list(writer.column("loss").values()) == pytest.approx(trainings[0].losses, rel=1e-6)
    assert session.hearing.notes == TOLD


def test_a_model_that_takes_a_lock_to_list_its_parameters_is_not_waited_for_by_who_holds_it(tmp_path, workers):
    locked, listing = threading.RLock(), threading.Event()

    class Locked(nn.Linear):
        asked = 0

        def parameters(self, recurse=True):
            if threading.current_thread() is thread:
                self.asked += 1
                if self.asked > 1:  # not whether it is trained at all, but whether it is of the same training
                    listing.set()
                    assert locked.acquire(timeout=20), "the threads wait for each other"
                    locked.release()
            return super().parameters(recurse)

    thread = threading.Thread(target=lambda: model(X))
    with followed(tmp_path) as (session, writer):
        training, other, model = Training(), Training(lr=0.7), Locked(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training.step()

        def holds():
            with locked:
                thread.start()
                assert listing.wait(20)
                other.step()

        workers[0](holds)
        thread.join()
        optimizer.zero_grad()
    assert session.hearing.notes == TOLD
    assert writer.column("lr") == {1: 0.1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_that_is_forked_while_threads_change_does_not_wait_for_them(tmp_path, workers):
    with followed(tmp_path) as (session, _):
        Training().step()
        workers[0](session.hearing._changing.acquire)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            done, both = [], threading.Barrier(2)  # one may have the number of the thread that holds the lock

            def asks():
                both.wait()
                done.append(session.hearing.goes_on(lambda: False))
                both.wait()

            threads = [threading.Thread(target=asks) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os._exit(done != [False, False])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        workers[0](session.hearing._changing.release)


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("serves", ["whole", "part", "learning"])
def test_who_serves_the_model_that_is_trained_is_in_no_row(tmp_path, workers, recipe, serves):
    def rows(folder, serving):
        with followed(folder, every=1, judge="current", recipe=recipe) as (_, writer):
            torch.manual_seed(0)
            training = Training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
            first, jobs = training.model[0], []
            first.register_forward_hook(lambda *_: jobs.pop()() if jobs else None)

            def serve():
                with torch.set_grad_enabled(serves == "learning"):
                    served = (training.model if serves != "part" else first)(100 * X)
                    if serves == "learning":
                        torch.autograd.grad(served.square().mean(), list(training.model.parameters()))

            for x in BATCHES[:4]:
                jobs += [lambda: workers[0](serve)] * serving  # within a forward
                training.step(x)
                if serving:
                    workers[0](serve)
        return {
            (step, site): {name: float(columns[name][at]) for name in ("numel", "amax", "std")}
            for step, sites, columns in writer.tensors
            for at, site in enumerate(sites)
        }

    alone = rows(tmp_path / "alone", 0)
    assert len(alone) >= 4 * 6
    assert rows(tmp_path / "served", 1) == alone


def test_the_baseline_s_autocast_ends_with_the_call_of_the_thread_that_entered_it(tmp_path, workers):
    with followed(tmp_path, baseline="bf16") as (_, writer):
        training, dtypes = Training(nn.Sequential(linear())), []
        running, go_on = threading.Event(), threading.Event()

        def slow(module, args, output):
            dtypes.append(output.dtype)
            if len(args[0]) == 1:
                running.set()
                assert go_on.wait(60)

        training.model.register_forward_hook(slow)
        looks = workers[0].begins(lambda: training.model(X[:1]))
        assert running.wait(60)
        for p in training.model.parameters():
            p.grad = torch.zeros_like(p)
        training.optimizer.step()  # so the one that looks loses its turn, within the call
        training.step()
        go_on.set()
        looks.result(60)
        assert workers[0](lambda: torch.is_autocast_enabled("cpu")) is False
        assert torch.is_autocast_enabled("cpu") is False
        training.step()
        workers[0](training.step)
    assert dtypes == [torch.bfloat16] * 4
    assert len(writer.column("lr")) == 4


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_measured_at_the_same_weights_is_of_the_thread_that_trains(tmp_path, workers, autocast):
    """A look in another thread, under other modes, is no part of the step; and leaves no mode there."""
    probe = make_probe(steps=(2, 3))
    with followed(tmp_path, probe=probe):
        training = Training(nn.Sequential(linear()))

        def looks():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                training.model(X[:1])

        training.step()
        workers[0](looks)
        training.step()
        workers[0](training.step)
        assert workers[0](torch.overrides._get_current_function_mode_stack) == []
    assert probe.notes == []
    assert [row.step for _, row in probe.results] == [2, 3]
    assert torch.overrides._get_current_function_mode_stack() == []
