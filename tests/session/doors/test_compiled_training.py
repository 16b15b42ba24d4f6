"""A whole step of training in one compiled function has the graphs, breaks and frames that it has without us."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tests.compute.nn.compiled_steps import Counted, Plain, unheard
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters
from torch.optim.optimizer import _use_grad_for_differentiable, register_optimizer_step_pre_hook

import narrowgauge as ng
from narrowgauge.compute.nn.tracing import step_breaks

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's
]
STEPS = 4
ROWS = ("loss", "grad_norm", "lr", "tokens", "microbatches")


class Leaves(nn.Module):
    """Leaves its graph between two operations."""

    def forward(self, x):
        x = x.relu()
        torch._dynamo.graph_break()
        return x * 2


class Training:
    """A model, and a step of training that does this in another way than most."""

    def __init__(self, *ways, kind=torch.optim.AdamW):
        torch.manual_seed(0)
        self.ways = ways
        middle = Leaves() if "model leaves" in ways else nn.ReLU()
        self.model = nn.Sequential(nn.Linear(16, 32), middle, nn.Linear(32, 4))
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.x, self.y = torch.randn(8, 16), torch.randn(8, 4)
        for p in self.model.parameters() if "hooks" in ways else ():
            p.register_post_accumulate_grad_hook(self.halve)

    def run(self, compiled, steps=STEPS):
        """Train; the losses."""
        step = compiled(self.step)
        return [step(self.x, self.y).item() for _ in range(steps)]

    def halve(self, p):
        p.grad.mul_(0.5)

    def step(self, x, y):
        if "zero first" in self.ways:
            self.optimizer.zero_grad()
        if "in a loop" in self.ways:
            for _ in range(1):
                loss = self.learn(x, y)
        else:
            loss = self.learn(x, y)
        if "scaler" in self.ways:
            self.scaler.unscale_(self.optimizer)
        if "clip" in self.ways:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if "clip, finite" in self.ways:  # leaves its graph to look
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1, error_if_nonfinite=True)
        if "scaler" in self.ways:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif "closure" in self.ways:
            self.optimizer.step(lambda: loss)
        elif "no step" not in self.ways:
            self.optimizer.step()
        if "model.zero_grad" in self.ways:
            self.model.zero_grad()
        elif "zero first" not in self.ways:
            self.optimizer.zero_grad()
        return loss

    def learn(self, x, y):
        if "autocast" in self.ways:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(self.model(x).float(), y)
        else:
            loss = nn.functional.mse_loss(self.model(x), y)
        if "scaler" in self.ways:
            self.scaler.scale(loss).backward()
        elif "torch.autograd.backward" in self.ways:
            torch.autograd.backward(loss)
        else:
            loss.backward()
        return loss


def counts(run, backend="eager"):
    """What `run` returns, given what compiles; and what torch's compiler counts meanwhile."""
    torch._dynamo.reset()
    counters.clear()
    counted = Counted(backend)
    found = run(lambda step: torch.compile(step, backend=counted.backend))
    return found, {
        "graphs": counted.graphs,
        "unique": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),  # of one that is reached through us torch says it otherwise
        "frames": dict(counters["frames"]),
    }


def watched(training, folder, every=100):
    def run(compiled):
        with ng.watch(training.model, out=folder, every=every):
            return training.run(compiled)

    return run


def given_to_the_compiler():
    """Functions of ours that were, by themselves."""
    seen = [known() for known in convert_frame.input_codes.seen]
    return [f"{code.co_filename}: {code.co_name}" for code in seen if code and "/narrowgauge/" in code.co_filename]


def rows(folder):
    found = ng.open_run(folder).scalars()
    return {name: found[name].tolist() for name in ROWS}


@pytest.fixture(scope="module", autouse=True)
def settled(tmp_path_factory):
    """Torch's compiler learns of its first functions, with us and without, what it does not forget again."""
    counts(watched(Training(), tmp_path_factory.mktemp("first") / "run"))
    counts(Training().run)


CASES = {
    "adamw": Training,
    "sgd": partial(Training, kind=torch.optim.SGD),
    "own": partial(Training, kind=Plain),
    "own, clip": partial(Training, "clip", kind=Plain),
    **{
        way: partial(Training, *way.split("; "))
        for way in (
            "clip",
            "clip, finite",
            "autocast",
            "scaler",
            "scaler; clip",
            "model.zero_grad",
            "zero first",
            "torch.autograd.backward",
            "torch.autograd.backward; clip; autocast",
            "model leaves",
            "in a loop",
            "hooks",
            "closure",
            "no step",
        )
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_graphs_breaks_and_frames_that_it_has_without_us(case, tmp_path):
    with unheard():
        losses, alone = counts(CASES[case]().run)
    assert alone["breaks"]
    found, with_us = counts(watched(CASES[case](), tmp_path / "run"))
    assert given_to_the_compiler() == []
    assert found == losses
    frames = [counted.pop("frames")["total"] for counted in (with_us, alone)]
    assert with_us == alone
    assert frames[0] in (frames[1] - 1, frames[1])  # what is left of a step behind its hooks is none with ours


@pytest.mark.parametrize("case", [case for case in CASES if case != "no step"])
def test_its_rows_are_those_of_the_same_program_uncompiled(case, tmp_path):
    losses, _ = counts(watched(CASES[case](), tmp_path / "compiled"))
    watched(CASES[case](), tmp_path / "plain")(lambda step: step)
    found, want = rows(tmp_path / "compiled"), rows(tmp_path / "plain")
    assert found["loss"] == pytest.approx(losses)
    assert want["lr"] == [0.01] * STEPS
    for name in ROWS:
        assert found[name] == pytest.approx(want[name], rel=1e-5), name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_so_it_has_with_other_backends(backend, tmp_path):
    make = CASES["torch.autograd.backward; clip; autocast"]
    losses, alone = counts(make().run, backend)
    found, with_us = counts(watched(make(), tmp_path / "run"), backend)
    assert found == losses
    assert with_us == alone


def test_recorded_steps_between_compiled_ones_make_no_other_graphs(tmp_path):
    """They run uncompiled, with a hook in every layer."""
    _, alone = counts(Training("clip").run)
    _, with_us = counts(watched(Training("clip"), tmp_path / "run", every=2))
    assert with_us == alone
    watched(Training("clip"), tmp_path / "plain", every=2)(lambda step: step)
    for name in ("update_ratio", "param_norm"):
        found, want = (ng.open_run(tmp_path / run).scalars(name) for run in ("run", "plain"))
        assert found["step"].tolist() == [2, 4]
        assert found[name].tolist() == pytest.approx(want[name].tolist(), rel=1e-4)


def test_what_was_compiled_in_one_watch_is_heard_in_the_next(tmp_path):
    training, step = Training(), []

    def compiled(function):
        step.extend([torch.compile(function, backend="eager")] * (not step))
        return step[0]

    torch._dynamo.reset()
    for name in ("first", "second"):
        losses = watched(training, tmp_path / name)(compiled)
        assert rows(tmp_path / name)["loss"] == pytest.approx(losses)
        assert rows(tmp_path / name)["lr"] == [0.01] * STEPS
        training.run(compiled, 1)


def test_a_step_that_fails_is_none(tmp_path):
    """Behind it torch does what it does behind the updates."""

    class Fails(torch.optim.SGD):
        @_use_grad_for_differentiable
        def step(self, closure=None):
            if fails:
                raise ValueError("no step")

    fails, model = [True], nn.Linear(16, 4)
    optimizer = Fails(model.parameters(), lr=0.01)
    torch._dynamo.reset()
    with ng.watch(model, out=tmp_path / "run", every=100):
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            with pytest.raises(ValueError, match="no step"):
                step()
        fails.clear()
        step()
    assert ng.open_run(tmp_path / "run").scalars("microbatches")["microbatches"].tolist() == [2]


def test_an_own_optimizer_stays_in_one_graph_behind_a_step_of_torch_s(tmp_path):
    """All steps go through one function of torch's, which must not be given up."""
    torch._dynamo.reset()
    graphs = []
    with ng.watch(out=tmp_path / "run", every=100):
        for kind in (torch.optim.AdamW, Plain):
            model, counted = nn.Linear(16, 4), Counted("eager")
            optimizer = kind(model.parameters(), lr=0.01)
            step = torch.compile(optimizer.step, backend=counted.backend, fullgraph=kind is Plain)
            for _ in range(2):
                model(torch.ones(2, 16)).sum().backward()
                step()
                optimizer.zero_grad()
            graphs.append(counted.graphs)
    assert graphs == [1, 1]
    assert len(ng.open_run(tmp_path / "run").scalars("lr")["lr"]) == 4


@pytest.mark.parametrize("place", ["pre", "post"])
def test_hooks_of_the_programs_own_see_ours_where_they_do_uncompiled(place, tmp_path):
    """The norm is that of gradients before the program changes them."""

    def run(compiled):
        training = Training(kind=torch.optim.SGD)

        def change(optimizer, args, kwargs):
            for p in training.model.parameters():
                p.grad.mul_(0.5)

        getattr(training.optimizer, f"register_step_{place}_hook")(change)
        return watched(training, tmp_path / ("run" if compiled else "plain"))(compiled or (lambda step: step))

    counts(run)
    run(None)
    assert rows(tmp_path / "run")["grad_norm"] == pytest.approx(rows(tmp_path / "plain")["grad_norm"], rel=1e-5)


def test_so_do_hooks_of_the_program_for_all_optimizers(tmp_path):
    def run(compiled):
        training = Training(kind=torch.optim.SGD)

        def change(optimizer, args, kwargs):
            for p in training.model.parameters():
                p.grad.mul_(0.5)

        def step(function):
            handles.append(register_optimizer_step_pre_hook(change))  # behind ours
            return (compiled or (lambda step: step))(function)

        handles = []
        try:
            return watched(training, tmp_path / ("run" if compiled else "plain"))(step)
        finally:
            handles[0].remove()

    counts(run)
    run(None)
    assert rows(tmp_path / "run")["grad_norm"] == pytest.approx(rows(tmp_path / "plain")["grad_norm"], rel=1e-5)


ALONE = {
    "clip": lambda model: (nn.utils.clip_grad_norm_, list(model.parameters()), 0.1),
    "loss": lambda model: (torch.binary_cross_entropy_with_logits, *torch.rand(2, 2, 4), None, None, 1),
    "zero": lambda model: (model.zero_grad,),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("case", ALONE)
def test_what_stands_in_the_place_of_torch_s_may_be_compiled_by_itself(case, fullgraph, tmp_path):
    # Torch keeps which of its functions it knows from when it first compiled: perhaps under a watch, in a test before.
    torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()

    def run(watches):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, counted = nn.Linear(16, 4), Counted("eager")
        with ng.watch(model, out=tmp_path / "run", every=100) if watches else nullcontext():
            optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
            function, *given = ALONE[case](model)
            function = torch.compile(function, backend=counted.backend, fullgraph=fullgraph)
            for _ in range(3):
                model(torch.ones(2, 16)).square().sum().backward()
                found.append(function(*given))
                optimizer.step()
                optimizer.zero_grad()
        return counted.graphs, found

    alone = run(False)
    assert alone[0] == (case != "zero")
    assert run(True) == alone
    if case == "clip":
        assert rows(tmp_path / "run")["grad_norm"] == pytest.approx([norm.item() for norm in alone[1]], rel=1e-5)


def test_what_a_program_puts_in_the_place_of_torchs_graph_break_is_left_alone(monkeypatch):
    def torchs(msg=""):
        return None

    def own(msg=""):
        return "own"

    monkeypatch.setattr(step_breaks, "_original", [])
    monkeypatch.setattr(step_breaks, "TELLS", [])
    monkeypatch.setattr(torch._dynamo, "graph_break", torchs)
    codes = torchs.__code__, own.__code__
    assert step_breaks.hear(lambda optimizer, ended: None, lambda *_: True)
    assert torchs.__code__ is not codes[0]
    monkeypatch.setattr(torch._dynamo, "graph_break", own)
    step_breaks.forget()
    assert (torchs.__code__, own.__code__) == codes
    assert own() == "own"
    monkeypatch.setattr(torch._dynamo, "graph_break", partial(own))  # of what has no code, there is none to swap
    assert not step_breaks.hear(lambda optimizer, ended: None, lambda *_: True)


@pytest.mark.parametrize("what", ["backward", "step"])
def test_a_backward_pass_that_is_compiled_runs_as_without_us(what, tmp_path):
    import torch._dynamo.config as compiler

    def trained(folder=None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net, losses = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            loss = (net(x) - x).square().mean()
            loss.backward()
            return loss

        with nullcontext() if folder is None else ng.watch(net, out=folder, every=2):
            run = torch.compile(step if what == "step" else lambda loss: loss.backward(), backend="aot_eager")
            for _ in range(4):
                x = torch.randn(8, 16)
                if what == "step":
                    loss = run(x)
                else:
                    run(loss := (net(x) - x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    with compiler.patch(compiled_autograd=True):
        alone, watched = trained(), trained(tmp_path / "run")
    assert watched == pytest.approx(alone, rel=1e-6)
    assert ng.open_run(tmp_path / "run").scalars("loss")["loss"].tolist() == pytest.approx(alone, rel=1e-6)
