"""Brief rows of programs with an engine, which scales, clips and skips by itself: a stand-in of what is heard of it."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.session.doors import test_megatron
from tests.session.doors.test_deepspeed import ENGINE, Engine, loaded
from tests.session.doors.test_megatron import Optimizer, megatron
from tests.session.steps.alone import AROUND, Model, batch, evaluated, notes, nothing_is_compiled, run
from tests.session.steps.test_brief import BETWEEN, EACH, IN_BRIEF
from tests.session.steps.test_brief_scaled import BAD, as_in_whole_rows

from narrowgauge.session.steps.usual import Usual

__all__ = ["loaded", "megatron", "nothing_is_compiled"]  # fixtures for tests here

TOO_LARGE = 1e30


def falling(engine, number):
    """As an engine's own schedule: behind its optimizer's step, in its own."""
    for at, group in enumerate(engine.basic_optimizer.param_groups):
        group["lr"] = 0.1 / (number + at)


class Scheduled(Engine):
    """With a schedule, and a scale that falls with each skipped step."""

    steps = 0

    def _take_model_step(self):
        before = self.skipped_steps
        super()._take_model_step()
        self.steps += 1
        if self.skipped_steps > before:
            self.optimizer.loss_scale /= 2
        else:
            falling(self, self.steps)


def nothing(number, engine):
    """As most do."""


def trained(losses, engine=Scheduled, micro=2, bad=(), amid=nothing, around=nothing, **words):
    """Steps of so many microbatches, of which those in `bad` are skipped; something is done `amid` and behind each."""
    engine = engine(Model(), **words)
    for number in EACH:
        for part in range(micro):
            x = batch(micro * number + part)
            loss = F.mse_loss(engine(x), x) * (TOO_LARGE if number in bad else 1.0) / micro
            engine.backward(loss)
            losses.append(loss.item())
        amid(number, engine)
        engine.step()
        around(number, engine)


class Plain(Scheduled):
    """Without an optimizer of its own around the program's, which it has set gradients to zero."""

    def __init__(self, model):
        torch.nn.Module.__init__(self)
        self.module, self.skipped_steps = model, 0
        self.optimizer = self.basic_optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def backward(self, loss):
        loss.backward()

    def _take_model_step(self):
        if torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters()]).isfinite():
            sys.modules[ENGINE].clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            falling(self, self.steps)
        else:
            self.skipped_steps += 1
            for p in self.module.parameters():
                p.grad = None

    def get_global_grad_norm(self):
        return None


class Scaled(Plain):
    """By torch's gradient scaler, group by group; its rates fall in skipped steps as well."""

    def __init__(self, model):
        super().__init__(model)
        groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": 0.1 / dim} for dim in (2, 1)]
        self.optimizer = self.basic_optimizer = torch.optim.AdamW(groups)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def _take_model_step(self):
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.param_groups = groups
        self.steps += 1
        falling(self, self.steps)
        for p in self.module.parameters():
            p.grad = None


def brief(tmp_path, program):
    """A program whose rows are brief between recorded ones, and what they have is as in whole ones."""
    session, writer = as_in_whole_rows(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    assert not session.hearing.notes
    return session, writer


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("parts", [1, 2], ids=["group by group", "part by part"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_an_engine_s_steps_are_brief_however_often_its_optimizer_steps_in_each(tmp_path, loaded, scale, parts, micro):
    loaded()
    session, writer = brief(tmp_path, lambda losses: trained(losses, parts=parts, micro=micro, scale=scale))
    assert not notes(session)
    assert list(writer.column("loss")) == EACH
    rates = {"lr_0", "lr_1", *(["loss_scale"] if scale > 1 else [])}
    assert all(set(writer.scalars[at]) == IN_BRIEF | rates for at in BETWEEN)
    assert list(writer.column("lr").values()) == [0.1, *(0.1 / at for at in EACH[:-1])]
    assert session.facts()["watch"]["steps_in_brief"] == len(BETWEEN)


@pytest.mark.parametrize("scalars", ["loss", "recorded"])
def test_a_step_that_it_skips_is_a_skipped_one(tmp_path, loaded, scalars):
    loaded()

    def program(losses):
        trained(losses, scale=2.0**100, bad=BAD)

    if scalars == "loss":
        session, writer = brief(tmp_path, program)
        assert list(writer.column("skipped")) == list(BAD)
        assert list(writer.column("loss_scale")) == EACH
        assert len(set(writer.column("loss_scale").values())) == len(BAD) + 1
    else:
        _, session, writer = run(tmp_path, program, scalars)
        assert list(writer.column("loss")) == AROUND
    assert session.facts()["skipped_steps"] == len(BAD)
    assert session.facts()["steps"] == len(EACH)


def test_whole_rows_behind_brief_ones_have_the_norm_of_their_own_step(tmp_path, loaded):
    """An engine without an optimizer around the program's clips, and its schedule sets gradients to zero."""

    def clipped(parameters, max_norm):
        return torch.nn.utils.get_total_norm([p.grad for p in parameters])

    loaded()
    sys.modules[ENGINE].DeepSpeedEngine, sys.modules[ENGINE].clip_grad_norm_ = Plain, clipped
    session, writer = brief(tmp_path, lambda losses: trained(losses, Plain))
    assert list(writer.column("grad_norm")) == [at for at in EACH if at not in BETWEEN]
    assert not session.updates._clips  # of steps that are left alone none is kept


@pytest.mark.parametrize("which", ["direct", "then an engine's", "in turns", "that skips"])
def test_an_optimizer_that_steps_in_an_engine_and_without_one(tmp_path, loaded, which):
    def step(number, engine):
        by_engine = {"direct": number < 4, "in turns": number % 2 == 0}.get(which, number > 13)
        if by_engine:
            engine.step()
        else:
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    def program(losses):
        engine = Plain(Model())
        for number in EACH:
            x = batch(number)
            loss = F.mse_loss(engine(x), x) * (TOO_LARGE if which == "that skips" and number == 14 else 1.0)
            losses.append(loss.item())
            engine.backward(loss)
            step(number, engine)

    loaded()
    sys.modules[ENGINE].DeepSpeedEngine = Plain
    session, writer = as_in_whole_rows(tmp_path, program)
    assert session.facts()["steps"] == len(EACH)
    wanted = {"direct": 2, "in turns": len(BETWEEN) - 2}.get(which, 11)
    assert session.steps.rest.steps >= wanted
    assert list(writer.column("skipped")) == [14] * (which == "that skips")


def is_infinite(of):
    """Gradients of the model's matrices, of its vectors, or of both are, in the steps that are bad."""

    def amid(number, engine):
        for p in engine.module.parameters():
            if number in BAD and p.dim() in of:
                p.grad.fill_(float("inf"))

    return amid


@pytest.mark.parametrize("of", [(1, 2), (1,), (2,)])
@pytest.mark.parametrize("scalars", ["loss", "recorded"])
def test_a_gradient_scaler_in_an_engine_skips_all_or_a_part(tmp_path, loaded, of, scalars):
    def program(losses):
        trained(losses, Scaled, micro=1, amid=is_infinite(of))

    loaded()
    sys.modules[ENGINE].DeepSpeedEngine = Scaled
    session, writer = as_in_whole_rows(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    assert list(writer.column("skipped")) == list(BAD)
    assert len(set(writer.column("lr_1").values())) == len(EACH)
    _, session, _ = run(tmp_path, program, "recorded")
    assert session.facts()["skipped_steps"] == len(BAD)


def evaluates(number, engine):
    if number % 5 == 0:
        evaluated(engine.module)


def is_stepped_past_it(number, engine):
    if number == 14:
        for x in (batch(200), batch(201)):
            engine.backward(F.mse_loss(engine(x), x))
        engine.optimizer.step()


def raises(number, engine):
    if number == 14:
        x = batch(200)
        engine.backward(F.mse_loss(engine(x), x))
        groups = engine.basic_optimizer.param_groups
        with pytest.raises(ZeroDivisionError):
            engine.stop()
        engine.basic_optimizer.param_groups = groups


def steps_nothing(number, engine):
    if number == 14:
        x = batch(200)
        engine.backward(F.mse_loss(engine(x), x))
        engine.optimizer.optimizer.step = lambda: None
        engine.step()
        del engine.optimizer.optimizer.step


def another_is_made(number, engine):
    if number == 14:
        Scheduled(Model())


class Stops(Scheduled):
    """Once, behind the step of the first of its groups."""

    def stop(self):
        def inner():
            del self.optimizer.optimizer.step
            self.optimizer.optimizer.step()
            raise ZeroDivisionError

        self.optimizer.optimizer.step = inner
        self._take_model_step()


@pytest.mark.parametrize(
    ("when", "happens", "steps"),
    [
        ("amid", evaluates, 24),
        ("amid", another_is_made, 24),
        ("around", evaluates, 24),
        ("around", another_is_made, 24),
        ("around", is_stepped_past_it, 25),
        ("around", raises, 25),
        ("around", steps_nothing, 24),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_what_comes_between_them(tmp_path, loaded, happens, steps, when, parts):
    def program(losses):
        trained(losses, Stops, parts=parts, **{when: happens})

    loaded()
    _, told, every = run(tmp_path, program, "all")
    _, session, writer = run(tmp_path, program, "loss")
    assert session.facts()["steps"] == told.facts()["steps"] == steps
    assert session.steps.rest.steps > 5
    for name in ("loss", "lr", "lr_0", "lr_1", "grad_norm", "skipped", "eval_loss", "microbatches", "param_norm"):
        there = writer.column(name)
        assert there == {at: every.column(name)[at] for at in there}, name
    assert len(writer.column("loss")) == len(every.column("loss"))


def test_engines_that_take_turns(tmp_path, loaded):
    def program(losses):
        engines = [Scheduled(Model()), Scheduled(Model(), scale=8.0)]
        for number in EACH:
            engine = engines[number % 3 == 0]
            x = batch(number)
            loss = F.mse_loss(engine(x), x)
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()

    loaded()
    session, writer = as_in_whole_rows(tmp_path, program)
    assert session.steps.rest.steps > 10
    assert not notes(session)
    assert set(writer.column("loss_scale")) == {at for at in EACH if at % 3 == 0}


def test_two_engines_in_one_step_have_whole_rows(tmp_path, loaded):
    def program(losses):
        engines = [Scheduled(Model()), Scheduled(Model())]
        for number in EACH:
            for engine in engines:
                x = batch(number)
                engine.backward(F.mse_loss(engine(x), x))
            for engine in engines:
                engine.step()

    loaded()
    session, writer = as_in_whole_rows(tmp_path, program)
    assert session.steps.rest.steps == 0
    assert list(writer.column("grad_norm")) == EACH
    assert "do not come again" in notes(session)[0]


@pytest.mark.parametrize("before", [0, 5])
def test_a_pipeline_s_engine_has_whole_rows(tmp_path, loaded, before):
    class Pipeline(Scheduled):
        def _exec_schedule(self, run):
            run()

    def program(losses):
        engine = Pipeline(Model())
        for number in EACH:
            x = batch(number)

            def train(x=x):
                engine.backward(F.mse_loss(engine(x), x))
                engine.step()

            train() if number <= before else engine._exec_schedule(train)

    loaded()
    module = sys.modules["deepspeed.runtime.pipe.engine"] = type(sys)("deepspeed.runtime.pipe.engine")
    module.PipelineEngine = Pipeline
    try:
        session, writer = as_in_whole_rows(tmp_path, program)
    finally:
        del sys.modules["deepspeed.runtime.pipe.engine"]
    assert session.steps.rest.steps == max(0, before - 2)
    assert list(writer.column("grad_norm")) == [1, 2, *EACH[before:]][-24:] if before else EACH
    assert "pipeline" in notes(session)[0]


def schedule(megatron, losses, optimizer, model, free=True, bad=(), around=lambda number: None):
    """Megatron's own loop of two microbatches a step, whose losses are emptied before their backward."""
    for number in EACH:
        for part in (0, 1):
            x = batch(2 * number + part)
            loss = F.mse_loss(model(x), x) / 2 * (float("inf") if number in bad else 1.0)
            losses.append(loss.item())
            megatron.schedules.deallocate_output_tensor(loss, free)
            megatron.schedules.custom_backward(optimizer.scale_loss(loss), None)
        for group in optimizer.optimizer.param_groups:
            group["lr"] = 0.1 / number
        optimizer.step()
        around(number)


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_megatron_s_steps_are_brief(megatron, tmp_path, free, scaled):
    def program(losses):
        model = Model()
        scaler = SimpleNamespace(scale=torch.tensor([1024.0])) if scaled else None
        schedule(megatron, losses, megatron.make(model, scaler), model, free)

    session, writer = brief(tmp_path, program)
    assert not notes(session)
    assert all(set(writer.scalars[at]) == IN_BRIEF | ({"loss_scale"} if scaled else set()) for at in BETWEEN)
    assert list(writer.column("loss")) == EACH


def test_of_its_schedule_a_backward_that_raises_is_none_of_a_step_s_loss(megatron, tmp_path):
    def program(losses):
        model = Model()
        optimizer = megatron.make(model)

        def fails(number):
            if number == 14:
                with pytest.raises(AssertionError):
                    megatron.schedules.custom_backward(model(batch(1)), None)

        schedule(megatron, losses, optimizer, model, around=fails)

    _, writer = as_in_whole_rows(tmp_path, program)
    assert 16 in writer.column("grad_norm")


class Chain:
    """Two of its optimizers, that step one after the other; or the one skips, and so both."""

    def __init__(self, model):
        self.chained_optimizers = [Optimizer(part, clip=0.5) for part in (model.up, model.down)]
        self.optimizer = SimpleNamespace(
            param_groups=[group for each in self.chained_optimizers for group in each.optimizer.param_groups]
        )

    def scale_loss(self, loss):
        return loss

    def step(self):
        if not all(p.grad.isfinite().all() for each in self.chained_optimizers for p in each.own):
            for each in self.chained_optimizers:
                for p in each.own:
                    p.grad = None
            return False, None, None
        return True, max(each.step()[1] for each in self.chained_optimizers), None


class Gathering(Chain):
    """One whose step goes around the other's."""

    def step(self):
        return super().step()


@pytest.mark.parametrize("kind", [Chain, Gathering])
def test_a_chain_of_optimizers_is_one(megatron, tmp_path, kind, monkeypatch):
    modules = (
        sys.modules[test_megatron.SCALES[0]],
        sys.modules.setdefault("megatron.core.optimizer.layer_wise_optimizer", type(sys)("layer_wise_optimizer")),
    )
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.layer_wise_optimizer", modules[1])
    modules[0].ChainedOptimizer, modules[1].LayerWiseDistributedOptimizer = Chain, Gathering

    def program(losses):
        model = Model()
        schedule(megatron, losses, kind(model), model, bad=(5, 14))

    session, writer = as_in_whole_rows(tmp_path, program)
    assert list(writer.column("skipped")) == [5, 14]
    assert session.steps.rest.steps > len(BETWEEN) - 4  # behind a loss that is not finite a row is whole
    assert not notes(session)


def test_a_step_around_another_s_has_optimizers_of_its_own(megatron, tmp_path, monkeypatch):
    class Around(Chain):
        def __init__(self, model):
            super().__init__(model)
            *self.chained_optimizers, self.more = self.chained_optimizers

        def step(self):
            out = super().step()
            self.more.step()
            return out

    name = "megatron.core.optimizer.layer_wise_optimizer"
    monkeypatch.setitem(sys.modules, name, type(sys)(name))
    sys.modules[test_megatron.SCALES[0]].ChainedOptimizer = Chain
    sys.modules[name].LayerWiseDistributedOptimizer = Around

    def program(losses):
        model = Model()
        schedule(megatron, losses, Around(model), model)

    session, _ = brief(tmp_path, program)
    assert not notes(session)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_stage_of_its_pipeline_has_whole_rows(megatron, tmp_path, last, own, monkeypatch):
    monkeypatch.setattr("narrowgauge.session.doors.megatron.stage_here", lambda: int(last))

    def program(losses):
        model = Model()
        optimizer = megatron.make(model) if own else torch.optim.SGD(model.parameters(), lr=0.01)
        for number in EACH:
            y = model(batch(number))
            output, gradient = (y.square().mean(), None) if last else (y, torch.ones_like(y))
            megatron.schedules.deallocate_output_tensor(output, True)
            megatron.schedules.custom_backward(output, gradient)
            optimizer.step()
            model.zero_grad()

    session, writer = as_in_whole_rows(tmp_path, program)
    assert session.steps.rest.steps == 0
    assert list(writer.column("grad_norm")) == EACH
    assert "pipeline" in notes(session)[0]


def test_each_step_looked_at_is_as_the_one_before(tmp_path, loaded, monkeypatch):
    loaded()
    _, _, one = run(tmp_path, trained, "loss")
    monkeypatch.setattr(Usual, "begun", lambda *_: None)
    _, _, other = run(tmp_path, trained, "loss")
    for name in ("loss", "lr", "lr_0", "lr_1", "grad_norm", "microbatches"):
        assert one.column(name) == other.column(name)
