"""Of a watched program whose optimizer's step is compiled every step is recorded, with the numbers that it has."""

import math

import pytest
import torch
from tests.compute.nn.compiled_steps import Counted, build, compiled, run, weights

import narrowgauge as ng
from narrowgauge.compute.nn.linear import clock_of
from narrowgauge.observe.store import open_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's
]
STEPS = 12


def norm(tensors):
    return math.sqrt(sum(float(x.double().square().sum()) for x in tensors))


def watched(way, model, optimizer, folder, every, name="aot_eager"):
    """Train; return the graphs, what the run says, and what it should say of each step."""
    counted, held, truth = Counted(name), [p for group in optimizer.param_groups for p in group["params"]], []
    gradients = []
    for p in held:
        p.register_post_accumulate_grad_hook(torch.compiler.disable(lambda p: gradients.append(p.grad.clone())))
    with ng.watch(model, out=folder, every=every):
        once = compiled(way, model, optimizer, counted.backend)
        for _ in range(STEPS):
            gradients.clear()
            before = [p.detach().clone() for p in held]
            once()
            moved = norm([p.detach() - x for p, x in zip(held, before, strict=True)])
            truth.append(
                {"grad_norm": norm(gradients), "param_norm": norm(before), "update_ratio": moved / norm(before)}
            )
    recorded = open_run(folder)
    return counted.graphs, recorded, truth


def check(recorded, truth, every):
    for name in ("grad_norm", "param_norm", "update_ratio"):
        rows = recorded.scalars(name)
        steps = range(1, STEPS + 1) if name == "grad_norm" else range(every, STEPS + 1, every)
        assert rows["step"].tolist() == list(steps)
        assert rows[name].tolist() == pytest.approx([truth[step - 1][name] for step in steps], rel=1e-5)
    assert not [note for note in recorded.meta["notes"] if "DataLoader" not in note]


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adamw, foreach", "adamw, fused", "muon", "plain"])
def test_a_compiled_step_is_recorded_as_it_is_and_stays_compiled_in_recorded_steps(kind, tmp_path):
    twin, optimizer = build(kind)
    graphs, _ = run("step", twin, optimizer, STEPS)
    model, optimizer = build(kind)
    found, recorded, truth = watched("step", model, optimizer, tmp_path / "run", 1)
    check(recorded, truth, 1)
    assert found == graphs
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("sgd", "update and zero"),
        ("sgd", "train"),
        ("adamw", "two in one"),
        ("adamw", "scheduled step"),
        ("plain", "train"),
        ("plain", "two in one"),
        ("plain", "whole update"),
    ],
)
def test_a_function_that_steps_is_recorded_as_it_is(kind, way, tmp_path):
    """In recorded steps it runs uncompiled, with all that it calls."""
    twin, optimizer = build(kind)
    graphs, _ = run(way, twin, optimizer, STEPS)
    model, optimizer = build(kind)
    found, recorded, truth = watched(way, model, optimizer, tmp_path / "run", 4)
    check(recorded, truth, 4)
    assert found == graphs
    if kind == "plain":  # the operations of others torch writes otherwise in a graph
        assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize(("kind", "way"), [("adamw", "step"), ("plain", "whole update"), ("plain", "train")])
def test_a_converted_model_is_recorded_as_it_is(kind, way, tmp_path):
    model, optimizer = build(kind)
    ng.convert(model, "delayed")
    _, recorded, truth = watched(way, model, optimizer, tmp_path / "run", 4)
    check(recorded, truth, 4)
    assert clock_of(model).step == STEPS


def test_the_move_is_measured_where_code_is_generated(tmp_path):
    model, optimizer = build("plain")
    found, recorded, truth = watched("step", model, optimizer, tmp_path / "run", 1, "inductor")
    check(recorded, truth, 1)
    assert found == 1


def test_the_move_is_none_of_what_the_program_does_to_the_weights_afterwards(tmp_path):
    model, optimizer = build("plain")
    held, truth = list(model.parameters()), []
    with ng.watch(model, out=tmp_path / "run", every=1):
        once = compiled("step", model, optimizer, "aot_eager")
        for _ in range(3):
            before = [p.detach().clone() for p in held]
            once()
            truth.append(norm([p.detach() - x for p, x in zip(held, before, strict=True)]) / norm(before))
            with torch.no_grad():
                for p in held:
                    p.mul_(0.5)
    assert open_run(tmp_path / "run").scalars("update_ratio")["update_ratio"].tolist() == pytest.approx(truth, rel=1e-5)


def test_learning_rates_of_a_schedule_are_recorded(tmp_path):
    model, optimizer = build("adamw")
    _, recorded, _ = watched("scheduled step", model, optimizer, tmp_path / "run", 100)
    _, optimizer = build("adamw")
    rates = []
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    assert recorded.scalars("lr")["lr"].tolist() == pytest.approx(rates)


@pytest.mark.parametrize(("kind", "whole"), [("sgd", False), ("plain", False), ("plain", True)])
def test_a_norm_that_is_clipped_in_a_graph_is_the_one_from_before(kind, whole, tmp_path):
    model, optimizer = build(kind)
    counted, norms = Counted(), []

    @torch.compile(backend=counted.backend, fullgraph=whole)
    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    with ng.watch(model, out=tmp_path / "run", every=100):
        for _ in range(4):
            model(torch.ones(2, 16)).square().mean().backward()
            norms.append(norm([p.grad for p in model.parameters()]))
            update()
            optimizer.zero_grad()
    assert open_run(tmp_path / "run").scalars("grad_norm")["grad_norm"].tolist() == pytest.approx(norms)
    assert counted.graphs == (3 if kind == "sgd" else 1)


def test_what_is_compiled_afterwards_is_compiled(tmp_path):
    """A recorded step that ended inside of a compiled function leaves nothing behind."""
    model, optimizer = build("plain")
    watched("whole update", model, optimizer, tmp_path / "run", 1)
    assert run("whole update", model, optimizer, 2)[0] == 1
