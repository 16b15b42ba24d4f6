"""`ng.watch`: the running process is watched from now on, as long as it is asked to be, and left as it was."""

import gc
import json
import os
import pickle
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.compute.nn import set_observer
from narrowgauge.errors import RunError, UsageError
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.plan import Plan
from narrowgauge.session.process.live import Live

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    functions = torch.autograd.backward, torch.compile, os._exit, torch.optim.Optimizer.__init__
    yield
    if Live.current is not None:
        Live.current.close()
    assert (torch.autograd.backward, torch.compile, os._exit, torch.optim.Optimizer.__init__) == functions
    assert not nn.modules.module._global_forward_pre_hooks


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, steps=4):
    for _ in range(steps):
        loss = (model(X) - X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def meta(folder):
    return json.loads((folder / "run.json").read_text())


class Listening(nn.Module):
    """Says of each call of its own, and of a part of its, whether calls of any module are heard."""

    def __init__(self):
        super().__init__()
        self.inner, self.linear, self.said, self.fails = nn.Linear(32, 32), nn.Linear(32, 32), [], False

    def forward(self, x):
        y = self.inner(x)
        self.said.append(bool(nn.modules.module._global_forward_pre_hooks))
        if self.fails:
            raise ValueError
        return self.linear(y)


def test_inside_of_a_model_no_hook_of_all_modules_is_in_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(CompiledCalls, "any", lambda self: False)  # whatever this process has compiled before
    torch.manual_seed(0)
    model, other = Listening(), nn.Linear(32, 32)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1e-3)
    hooks = nn.modules.module._global_forward_pre_hooks
    with ng.watch(out=tmp_path / "a", every=2) as watching:
        train(model, optimizer, 2)
        assert hooks  # another model may be called
        with torch.no_grad():
            model(X)
        model.fails = True
        with pytest.raises(ValueError):
            model(X)
        assert hooks
        model.fails = False
        (other(X) + model(X)).sum().backward()
        optimizer.step()
        assert model.said == [False] * 5
    assert not hooks
    assert meta(watching.folder)["meta"]["models"] == 2


def test_what_is_compiled_finds_the_same_hooks_as_ever(tmp_path):
    torch.manual_seed(0)
    model = Listening()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ng.watch(out=tmp_path / "a", every=2):
        torch.compile(torch.relu, backend="eager")
        train(model, optimizer, 2)
    assert model.said == [True] * 2


def test_nobody_reads_how_far_a_program_is_that_is_only_watched(tmp_path):
    with ng.watch(out=tmp_path / "a"):
        train(*trained())
    assert not (tmp_path / "a" / "status.json").exists()


def test_layers_that_the_program_converted_itself_are_watched(tmp_path):
    model, optimizer = trained()
    ng.convert(model, "current")
    with ng.watch(model, out=tmp_path / "a", every=2) as watching:
        train(model, optimizer)
    table = ng.open_run(watching.folder).tensors(columns=["numel"])
    rows = dict(
        zip(zip(table["step"].tolist(), table["site"].tolist(), strict=True), table["numel"].tolist(), strict=True)
    )
    roles = ("input", "weight", "grad_output", "output", "grad_weight")
    assert set(rows) == {(s, f"{m}:{role}") for s in (2, 4) for m in "02" for role in roles} | {
        (s, "2:grad_input") for s in (2, 4)
    }
    assert rows[2, "0:weight"] == 64 * 32
    assert all(layer._fp8.observer is None for layer in (model[0], model[2]))


def test_a_watch_that_could_not_begin_is_none(tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("an odd module")

    monkeypatch.setattr("narrowgauge.session.watching._catch_up", fails)
    with pytest.raises(RuntimeError, match="an odd module"):
        ng.watch(out=tmp_path / "a")
    assert Live.current is None
    assert meta(tmp_path / "a")["status"] == "failed"


def test_a_program_may_go_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained()
    with ng.watch(model, out="a", every=1) as watching:
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(model, optimizer)
    assert watching.folder == tmp_path / "a"
    assert ng.open_run(watching.folder).scalars("loss")["step"].tolist() == [1, 2, 3, 4]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_observer_of_the_programs_own_stays(tmp_path):
    class Own:
        def wants(self, module):
            return False

    model, optimizer = trained()
    ng.convert(model, "current")
    own = Own()
    set_observer(model, own)
    with ng.watch(model, out=tmp_path / "a", every=1) as watching:
        train(model, optimizer)
    assert model[0]._fp8.observer is own
    assert any("an observer of its own" in note for note in ng.open_run(watching.folder).meta["notes"])


def test_what_was_made_before_is_watched_as_long_as_the_block(tmp_path):
    model, optimizer = trained()
    train(model, optimizer, 1)
    with ng.watch(model, out=tmp_path / "a", every=2) as watching:
        last = train(model, optimizer)
    train(model, optimizer, 1)
    run = ng.open_run(watching.folder)
    assert run.status == "complete"
    assert run.scalars("loss")["step"].tolist() == [1, 2, 3, 4]
    assert run.scalars("loss")["loss"].tolist()[-1] == pytest.approx(last)
    assert set(run.tensors()["step"].tolist()) == {2, 4}
    assert {"0:input", "0:weight", "2:grad_output"} <= set(run.tensors()["site"].tolist())
    assert run.meta["not_found"] == []
    assert run.meta["weights_hash"]


def test_watching_changes_no_number(tmp_path):
    alone = train(*trained())
    with ng.watch(out=tmp_path / "a", every=1):
        assert train(*trained()) == alone


def test_a_plain_call_ends_with_close_and_twice_is_harmless(tmp_path):
    model, optimizer = trained()
    watching = ng.watch(model, out=str(tmp_path / "a"))
    assert repr(watching) == f"<narrowgauge watch into {tmp_path / 'a'}>"
    train(model, optimizer, 3)
    watching.close()
    watching.close()
    assert repr(watching).endswith(", ended>")
    assert meta(tmp_path / "a")["meta"]["steps"] == 3
    with pytest.raises(UsageError, match=r"^the watch into .* has ended; call ng\.watch again, with another folder\.$"):
        watching.__enter__()


def test_cells_of_a_notebook_share_a_watch(tmp_path):
    names = {"out": tmp_path / "a"}
    cells = [
        "import torch, narrowgauge as ng\nfrom torch import nn",
        "model = nn.Linear(32, 32)\nwatching = ng.watch(model, out=out, every=1)",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "model(torch.ones(4, 32)).sum().backward()\noptimizer.step()",
        "raise ValueError('a typo in a cell')",
        "model(torch.ones(4, 32)).sum().backward()\noptimizer.step()",
        "watching.close()\nrun = ng.open_run(watching.folder)",
    ]
    for cell in cells:
        with pytest.raises(ValueError, match="typo") if "typo" in cell else nullcontext():
            exec(compile(cell, "<cell>", "exec"), names)
    assert names["run"].status == "complete"
    assert names["run"].scalars("loss")["step"].tolist() == [1, 2]


class Mute(Exception):
    """What it says fails."""

    def __str__(self):
        raise ValueError("no words")


def test_a_cell_that_makes_the_watched_model_anew_is_told_of(tmp_path, caplog):
    def train(seed):
        torch.manual_seed(seed)
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        yield model
        for _ in range(2):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        yield None

    cell = train(0)
    watching = ng.watch(next(cell), out=tmp_path / "run", every=1)
    next(cell)
    cell.close()
    del cell
    gc.collect()
    list(train(1))
    watching.close()
    meta = ng.open_run(watching.folder).meta
    assert (meta["steps"], meta["notes"]) == (2, [])
    [told] = meta["not_found"]
    assert told.startswith("The watched model was gone after step 2: what trained behind it is another model")
    assert told in caplog.text


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (False, "No optimizer of the watched model was found: those that there are hold none of its parameters"),
        (True, "No step was seen: no torch.optim optimizer of the watched model stepped."),
    ],
)
def test_an_optimizer_that_steps_another_model_than_the_watched_one_is_not_told_to_be_missing(
    tmp_path, caplog, own, said
):
    _, optimizer = trained()  # a notebook's, of the model that it had before
    model, unused = trained()
    if not own:
        del unused
        gc.collect()
    with ng.watch(model, out=tmp_path / "run", every=1) as watching:
        model(X).square().mean().backward()
        optimizer.step()
    [told] = ng.open_run(watching.folder).meta["not_found"]
    assert told.startswith(said)
    assert told in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "kept"),
    [
        (ValueError("no data"), "failed", "ValueError: no data"),
        (Mute(), "failed", "Mute: <exception str() failed>"),
        (SystemExit(2), "failed", "SystemExit: 2"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        *[(left, "complete", "") for left in (SystemExit(), SystemExit(0), GeneratorExit())],  # no errors
    ],
)
def test_an_error_inside_is_kept_in_the_run_and_goes_on(tmp_path, error, status, kept):
    model, optimizer = trained()

    def work():
        with ng.watch(model, out=tmp_path / "a"):
            train(model, optimizer, 2)
            raise error

    with pytest.raises(type(error)):
        work()
    found = meta(tmp_path / "a")
    assert (found["status"], found["meta"]["error"], found["meta"]["steps"]) == (status, kept, 2)


def test_the_revision_is_the_one_that_the_program_began_with(tmp_path, monkeypatch):
    found = iter(["1234567", "89abcde+changes"])  # edited and committed while it trains
    monkeypatch.setattr("narrowgauge.session.machine.git_revision", lambda folder: next(found))
    model, optimizer = trained()
    with ng.watch(model, out=tmp_path / "a"):
        train(model, optimizer, 1)
    assert meta(tmp_path / "a")["meta"]["git_revision"] == "1234567"


def test_two_at_a_time_are_refused_and_the_first_goes_on(tmp_path):
    model, optimizer = trained()
    with ng.watch(model, out=tmp_path / "a"):
        with pytest.raises(UsageError, match=rf"^this process is watched already, into {tmp_path}/a: one watch at a"):
            ng.watch(model, out=tmp_path / "b")
        train(model, optimizer, 2)
    assert not (tmp_path / "b").exists()
    assert meta(tmp_path / "a")["meta"]["steps"] == 2


def test_one_after_the_other_records_each(tmp_path):
    model, optimizer = trained()
    for name, steps in (("a", 2), ("b", 3)):
        with ng.watch(model, out=tmp_path / name):
            train(model, optimizer, steps)
        assert meta(tmp_path / name)["meta"]["steps"] == steps


def test_of_two_trainings_only_that_of_the_model_is_watched(tmp_path):
    model, optimizer = trained()
    with ng.watch(model, out=tmp_path / "a"):
        other, others = trained()
        train(other, others, 5)
        train(model, optimizer, 2)
    found = meta(tmp_path / "a")["meta"]
    assert (found["steps"], found["optimizers"], found["models"]) == (2, 1, 1)


def test_a_scaler_that_steps_another_optimizer_skips_no_step_of_the_model_that_is_watched(tmp_path):
    (made, made_by), (other, other_by), scaler = trained(), trained(), torch.amp.GradScaler("cpu", init_scale=64.0)
    with ng.watch(made, out=tmp_path / "a") as watching:
        for _ in range(3):
            fake = made(X)
            for given, optimizer in ((fake.detach(), other_by), (fake, made_by)):
                scaler.scale(other(given).mean()).backward()
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    rows = ng.open_run(watching.folder).scalars()
    assert rows["step"].tolist() == [1, 2, 3]
    assert "skipped" not in rows.columns
    assert rows["microbatches"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", ["one after the other", "through the other", "checkpointed"])
def test_what_reaches_another_model_alone_is_no_loss_of_the_one_that_is_watched(tmp_path, how):
    """As of a GAN's discriminator: its own loss; the generator's goes through it, and through a checkpoint perhaps."""
    (made, made_by), (other, other_by), said = trained(), trained(), []
    with ng.watch(made, out=tmp_path / "a") as watching:
        for _ in range(3):
            x = X.clone().requires_grad_()
            fake = checkpoint(made, x, use_reentrant=True) if how == "checkpointed" else made(x)
            (other(X).square().mean() + other(fake.detach()).mean()).backward()
            other_by.step()
            if how == "one after the other":
                other_by.zero_grad()
            loss = (fake if how == "one after the other" else other(fake)).square().mean()
            loss.backward()
            made_by.step()
            made_by.zero_grad()
            other_by.zero_grad()
            said.append(loss.item())
    row = ng.open_run(watching.folder).scalars(["loss", "microbatches"])
    assert row["loss"].tolist() == pytest.approx(said, rel=1e-6)
    assert row["microbatches"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 1}, r"^ng\.watch got a int as the model; expected a torch\.nn\.Module or nothing\.$"),
        ({"model": "runs/a"}, r"expected a torch\.nn\.Module or nothing\. The run's folder is out=\.\.\.$"),
        ({"every": 0}, r"^every is 0; expected a whole number: 1 \(every step\) or more\.$"),
        ({"every": 1.5}, r"^every is 1\.5; expected a whole number"),
        ({"every": True}, r"^every is True; expected a whole number"),
        ({"every": "5"}, r"^every is '5'; expected a whole number"),
        ({"config": "no.toml"}, r"no\.toml"),
        ({"config": ""}, r"^ng\.watch got '' as config=; expected the path of a narrowgauge\.toml, or nothing\.$"),
        ({"config": b"a.toml"}, r"^ng\.watch got a bytes as config=; expected the path of"),
        ({"config": {"watch": {"every": 2}}}, r"^ng\.watch got a dict as config=; expected the path of"),
        ({"out": ""}, r"^an empty name is no folder's; give the name of one as out=\.$"),
        (
            {"out": "a/x\0y"},
            r"^'a/x\\x00y' has a zero byte, which no name of a folder has; give another folder as out=\.$",
        ),
        ({"out": 7}, r"^int 7 names no folder; give the name of one as out=\.$"),
    ],
)
def test_wrong_arguments_are_refused_in_words(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        ng.watch(**{"out": tmp_path / "a", **arguments})
    assert list(tmp_path.iterdir()) == []


def test_two_runs_into_one_folder_and_a_file_are_refused(tmp_path):
    with ng.watch(out=tmp_path / "a"):
        pass
    with pytest.raises(UsageError, match="a is not empty; give another folder as out=, or delete it first"):
        ng.watch(out=tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file; give a folder"):
        ng.watch(out=tmp_path / "file")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", denied)
    with pytest.raises(UsageError, match=r"^cannot write to .*/a: Permission denied; give another folder"):
        ng.watch(out=tmp_path / "a")


def test_a_name_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is no UTF-8; give another folder as out=\.$"):
        ng.watch(out=tmp_path / os.fsdecode(b"l\xe4rm"))


def test_of_threads_that_begin_a_watch_at_once_one_does(tmp_path, monkeypatch):
    (model, _), told = trained(), []

    class Slow(Live):  # so that both have looked for a watch before one of them has begun
        def __init__(self, *args, **kwargs):
            time.sleep(0.2)
            super().__init__(*args, **kwargs)

    def begin(number):
        try:
            told.append(ng.watch(model, out=tmp_path / str(number)))
        except UsageError as error:
            told.append(str(error))

    monkeypatch.setattr("narrowgauge.session.watching.Live", Slow)
    threads = [threading.Thread(target=begin, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused, watching = sorted(told, key=lambda one: not isinstance(one, str))
    assert "this process is watched already" in refused
    watching.close()
    assert Live.current is None


def test_a_configuration_is_followed(tmp_path):
    (tmp_path / "narrowgauge.toml").write_text("[watch]\nevery = 3\n")
    model, optimizer = trained()
    with ng.watch(model, out=tmp_path / "a", config=tmp_path / "narrowgauge.toml") as watching:
        train(model, optimizer, 7)
    assert set(ng.open_run(watching.folder).tensors()["step"].tolist()) == {3, 6}


def test_a_rank_writes_its_part_into_a_folder_that_another_has_begun(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "of-another-rank").write_text("")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, optimizer = trained()
    with ng.watch(model, out=tmp_path / "a"):
        train(model, optimizer, 1)
    assert (tmp_path / "a" / "run.rank1.json").exists()


def test_a_module_that_was_compiled_in_place_before_is_followed(tmp_path):
    model, optimizer = trained()
    model.compile(backend="eager")
    train(model, optimizer, 1)
    with ng.watch(model, out=tmp_path / "a", every=100):
        train(model, optimizer, 2)
    found = meta(tmp_path / "a")["meta"]
    assert (found["steps"], found["models"], found["not_found"]) == (2, 1, [])


class Own(torch.optim.Optimizer):
    """One whose step goes into a graph as a whole."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", ["in the first watch", "before"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("what", ["loss", "model", "step", "own step"])
def test_what_is_compiled_once_may_be_watched_often(what, whole, compiled, tmp_path):
    if whole and what == "step":
        pytest.skip("torch's own optimizers break their graphs, watched or not")

    def losses(watched):
        torch._dynamo.reset()
        gc.collect()  # what earlier tests compiled and watched is gone
        torch._dynamo.utils.counters.clear()
        model, optimizer = trained()
        if what == "own step":
            optimizer = Own(model.parameters())
        held, found = [], []

        def one():
            if not held:
                plain = {"model": model, "loss": lambda: (model(X) - X).square().mean()}.get(what, optimizer.step)
                if what == "own step":
                    plain = lambda: optimizer.step()  # noqa: E731
                held.append(torch.compile(plain, backend="aot_eager", fullgraph=whole))
            y = held[0](X) if what == "model" else model(X) if what != "loss" else None
            loss = held[0]() if what == "loss" else (y - X).square().mean()
            loss.backward()
            held[0]() if "step" in what else optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            found.append(loss.item())

        if compiled == "before":
            one()
        for turn in range(10):
            with ng.watch(model, out=tmp_path / f"{turn}", every=2) if watched else nullcontext():
                one(), one()
            one()
        return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    alone, graphs = losses(False)
    seen, graphs_seen = losses(True)
    assert graphs_seen <= graphs + 2  # with hooks and without; the hooks' optimizer may know of none before
    runs = [meta(tmp_path / f"{turn}")["meta"] for turn in range(10)]
    assert [run["steps"] for run in runs] == [2] * 10
    unseen = [any("compiled before the watch" in note for note in run["notes"]) for run in runs]
    tables = [len(ng.open_run(tmp_path / f"{turn}").tensors()["step"]) for turn in range(10)]
    if compiled == "before" and what == "loss":
        assert (unseen, tables) == ([True] * 10, [0] * 10)
    else:
        assert tables == [6] * 10
    if compiled == "before" or what != "step":
        assert seen == alone


@pytest.mark.parametrize("owner", [os, torch.cuda, torch.cuda.graphs], ids=lambda module: module.__name__)
def test_what_stands_in_a_functions_place_is_pickled_as_that(tmp_path, owner):
    """As the target of a process that is spawned."""
    name = "_exit" if owner is os else "make_graphed_callables"
    before = getattr(owner, name)
    with ng.watch(out=tmp_path / "run"):
        assert getattr(owner, name) is not before
        assert pickle.loads(pickle.dumps(getattr(owner, name))) is getattr(owner, name)
    assert getattr(owner, name) is before


@pytest.mark.parametrize("code", [0, 3])
def test_os_exit_closes_the_run_first(tmp_path, monkeypatch, code):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)  # what would have ended the process
    model, optimizer = trained()
    ng.watch(model, out=tmp_path / "a")
    train(model, optimizer, 2)
    os._exit(code)
    assert left == [code]
    found = meta(tmp_path / "a")
    assert (found["status"], found["meta"]["error"]) == (("failed", "os._exit(3)") if code else ("complete", ""))
    assert ng.open_run(tmp_path / "a").scalars("loss")["step"].tolist() == [1, 2]
    monkeypatch.undo()


def test_os_exit_does_not_wait_for_a_run_that_cannot_be_closed(tmp_path, monkeypatch):
    import threading

    left, hold = [], threading.Event()
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr("narrowgauge.session.process.live.PATIENCE", 0.05)
    watching = ng.watch(out=tmp_path / "a")
    monkeypatch.setattr(watching._live.session, "finish", lambda **_: hold.wait())  # a device that does not answer
    os._exit(1)
    assert left == [1]
    hold.set()
    watching.close()
    monkeypatch.undo()


def test_a_forked_child_of_a_process_with_a_gpu_does_not_touch_it(tmp_path, monkeypatch):
    model, optimizer = trained()
    with ng.watch(model, out=tmp_path / "a", every=1):
        train(model, optimizer, 1)
        model(X)  # in the middle of a recorded step
        live = Live.current

        def touched(*args, **kwargs):
            raise AssertionError("the child of a fork must not touch the GPU")

        with monkeypatch.context() as context:  # as if the program had woken one
            context.setattr(torch.cuda, "is_initialized", lambda: True)
            for name in ("Event", "memory_stats", "memory_stats_as_nested_dict", "synchronize", "current_stream"):
                context.setattr(torch.cuda, name, touched)
            live.forked()
        assert os._exit.__name__ == "_exit"
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        Live.current = live  # the parent's part


def test_a_process_that_finds_its_folder_taken_records_beside_it(tmp_path):
    plan = Plan(variant="asis", out=str(tmp_path / "a"), command=("train.py",), compiling=True)
    with RunWriter(tmp_path / "a", {}):  # a worker's parent, say, that trains as well
        live = Live(plan, aside="process-1")
        assert live.folder == tmp_path / "a" / "process-1"
        live.close()
        again = Live(plan, aside="process-1")  # it has become another program, say
        assert again.folder == tmp_path / "a" / "process-1-2"
        again.close()
        with pytest.raises(RunError):
            Live(plan)
    assert meta(live.folder)["status"] == "complete"


@pytest.mark.parametrize("failed", [True, False])
def test_what_an_error_ended_is_told_to_hurry(tmp_path, monkeypatch, failed):
    told = []
    with pytest.raises(ValueError, match="spilled") if failed else nullcontext(), ng.watch(out=tmp_path / "a") as it:
        finish = it._live.session.ranks.finish
        monkeypatch.setattr(
            it._live.session.ranks, "finish", lambda *, failed: (told.append(failed), finish(failed=failed))
        )
        if failed:
            raise ValueError("spilled")
    assert told == [failed]


def test_a_model_that_raises_when_it_is_asked_something_in_the_end_keeps_nothing_of_ours(tmp_path):
    class Closed(nn.Sequential):
        closed = False

        def modules(self):
            if self.closed:
                raise RuntimeError("closed")
            return super().modules()

    model, backward = Closed(nn.Linear(8, 8)), torch.autograd.backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, tmp_path / "a") as watching:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        model.closed = True
        left, session = [], watching._live.session
        session.roots.leave = lambda leave=session.roots.leave: (left.append("models"), leave())
        session.graphs.callables.leave = lambda: left.append("callables")  # behind those
    assert torch.autograd.backward is backward
    assert not {*model._forward_hooks, *model._forward_pre_hooks}
    assert left[-1] == "callables"
    run = ng.open_run(tmp_path / "a")
    assert (run.status, run.meta["steps"]) == ("complete", 2)
    assert run.meta["notes"][-1] == "closing the run failed: RuntimeError('closed')"
