"""`narrowgauge run`: programs that know nothing of it, in as many processes as they like, run as they always did."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest
from tests.session import programs

import narrowgauge
from narrowgauge.observe.report.facts import how_it_ended
from narrowgauge.observe.report.single import single
from narrowgauge.observe.store import open_run

NARROWGAUGE = [sys.executable, "-c", "from narrowgauge.cli.main import main; main()"]
SOURCE = Path(narrowgauge.__file__).parents[1]  # of this checkout, whichever one is installed
PLAIN = {name: value for name, value in os.environ.items() if name != "NARROWGAUGE_PLAN"} | {"PYTHONPATH": str(SOURCE)}

FEW = (
    "narrowgauge: No tensor was recorded: the program made {}, and tensors are recorded every 10 steps. Write "
    "`--every 1` to record each step.\n"
)


def quiet(said):
    """Without the sentence about a program of few steps, as most here are."""
    return re.sub(FEW.format(".*"), "", said)


DDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(64, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
for x in data.split(16):
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("finished")
dist.destroy_process_group()
"""

EVALUATES = """
import torch
from torch import nn
model = nn.Linear(30, 60)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    nn.functional.mse_loss(model(torch.ones(4, 30)), torch.ones(4, 60))
model(torch.ones(4, 30)).square().mean().backward()
"""

WARNS = """
import warnings, torch
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, file, line, *_: print(file, line)
class Own(torch.optim.SGD):
    def add_param_group(self, group):
        warnings.warn("mine", stacklevel=3)
        super().add_param_group(group)
for _ in range(2):
    Own(torch.nn.Linear(2, 2).parameters())
"""

# Processes that know their ranks from nowhere but their process group.
SPAWNS = """
import sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
def train(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with model.no_sync():
            (model(torch.full((4, 32), 1.0 + rank)).square().mean() / 2).backward()
        (model(torch.full((4, 32), 3.0 + rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(train, (int(sys.argv[1]),), nprocs=2)
    print("finished")
"""

# Libraries that only ask for torch, before anything imports it, are not to be taken for its import.
LOADER = """
import sys
from importlib.util import find_spec
assert find_spec("torch") and find_spec("torch")
import torch
from torch import nn
from torch.utils.data import DataLoader
model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def main():
    for x in DataLoader(torch.randn(64, 32), batch_size=16, num_workers=2, multiprocessing_context=sys.argv[1]):
        model(x).square().mean().backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""

# Each process has the module's own model and optimizer; only what is started by the first one trains them.
TRAINS_ELSEWHERE = """
import multiprocessing, sys, torch
from torch import nn
model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(model, optimizer):
    torch.set_num_threads(1)
    nn.ReLU()(torch.ones(2, 2))
    with torch.no_grad():
        model(torch.ones(4, 32))
    for _ in range(3):
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
def on_its_own():
    train(model, optimizer)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    given = (on_its_own, ()) if sys.argv[2] == "own" else (train, (model, optimizer))
    child = context.Process(target=given[0], args=given[1])
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""

FORKS = """
import os, torch
from torch import nn
model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
train(2)
if os.fork() == 0:
    print("hooks in the child:", len(model._forward_hooks) + len(model._forward_pre_hooks))
    train(5)
    print("the child made 5 steps", flush=True)
    os._exit(0)
os.wait()
train(1)
"""


def run(folder, *words, options=(), script=None, env=PLAIN, warm=None):
    """`narrowgauge run --out out OPTIONS -- WORDS` in `folder`; its script is train.py. `warm` starts it if given."""
    if script is not None:
        (folder / "train.py").write_text(script)
    command = ["run", "--out", "out", *options, "--", *words]
    if warm is not None:
        return warm.narrowgauge(command, cwd=folder, env=env)
    return subprocess.run([*NARROWGAUGE, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def with_path(folder):
    """The environment with a folder before the path that programs have anyway."""
    return {**PLAIN, "PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)])}


def at_home(folder):
    """The environment with a home and a place for temporary files of its own in a folder, both empty."""
    own = {"HOME": folder / "home", "TMPDIR": folder / "temporary"}
    for path in own.values():
        path.mkdir()
    return PLAIN | {name: str(path) for name, path in own.items()}


def kept_at_home(folder):
    return {str(path.relative_to(folder)) for name in ("home", "temporary") for path in (folder / name).rglob("*")}


@pytest.fixture(scope="module")
def basic_alone(tmp_path_factory):
    """What BASIC prints unwatched, and leaves behind: torch has a folder of its own for what it compiles."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(programs.BASIC)
    words, env = [sys.executable, "train.py"], at_home(folder)  # a fork's torch has made its folder before
    printed = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
    return printed, kept_at_home(folder)


def steps(folder):
    return json.loads((folder / "run.json").read_text())["meta"]["steps"]


def installed():
    """All files of the environment, but for what Python keeps of any that it imports."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "scripts")}
    walked = (found for folder in folders for found in os.walk(folder) if "__pycache__" not in found[0])
    return {os.path.join(folder, name) for folder, _, names in walked for name in names}


def test_programs_of_these_tests_run_what_the_tests_import():
    code = "import narrowgauge; print(narrowgauge.__file__)"
    found = subprocess.run([sys.executable, "-c", code], env=PLAIN, capture_output=True, text=True).stdout
    assert found.strip() == narrowgauge.__file__


@pytest.mark.parametrize("words", [["train.py"], ["python", "train.py"], ["python", "-m", "train"], ["sh", "train.sh"]])
def test_a_program_runs_as_without_us_and_leaves_a_run(tmp_path, basic_alone, words):
    (tmp_path / "train.sh").write_text(f"exec {sys.executable} train.py\n")
    before, (printed, kept) = installed(), basic_alone
    done = run(tmp_path, *words, script=programs.BASIC, env=at_home(tmp_path))
    assert (done.returncode, done.stdout) == (0, printed)
    assert done.stderr == FEW.format("8 steps") + "narrowgauge: the run is in out\n"
    found = open_run(tmp_path / "out")
    assert found.status == "complete"
    assert steps(tmp_path / "out") == 8
    left = {p.name for p in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"home", "temporary", "out", "train.py", "train.sh"}
    assert kept_at_home(tmp_path) == kept
    assert installed() == before


def test_the_ranks_of_a_launcher_are_recorded_as_one(tmp_path, free_port):
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", str(free_port))
    done = run(
        tmp_path, *launcher, "train.py", options=("--convert", "current", "--every", "2"),
        script=DDP, env={**PLAIN, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2
    table = open_run(tmp_path / "out").tensors()
    assert {(0, 2)} == set(zip(table["rank"].tolist(), table["ranks"].tolist(), strict=True))
    assert {2, 4} == set(table["step"].tolist())
    rows = dict(zip(table["site"].tolist(), table["numel"].tolist(), strict=True))
    assert (rows["0:input"], rows["0:weight"]) == (2 * 16 * 32, 32 * 64)  # two batches, one weight
    assert (tmp_path / "out" / "run.rank1.json").exists()


@pytest.mark.slow
def test_processes_that_a_program_spawns_are_its_ranks(tmp_path, free_port):
    done = run(tmp_path, "train.py", str(free_port), options=("--every", "1"), script=SPAWNS)
    assert (done.returncode, done.stdout, quiet(done.stderr)) == (0, "finished\n", "narrowgauge: the run is in out\n")
    found = open_run(tmp_path / "out")
    assert (found.status, found.meta["ranks"]["merged_steps"]) == ("complete", 3)
    assert found.scalars("microbatches")["microbatches"].tolist() == [2, 2, 2]
    table = found.tensors(["numel", "amax", "ranks"], sites=["(model):input"])
    assert table["step"].tolist() == [1, 2, 3]
    assert set(table["numel"].tolist()) == {2 * 2 * 4 * 32}  # two ranks, two microbatches
    assert set(table["amax"].tolist()) == {4.0}
    assert set(table["ranks"].tolist()) == {2}


def test_a_spawned_rank_that_an_error_ends_says_so_and_holds_up_nobody(tmp_path, free_port):
    fails = "        optimizer.step()\n        if rank == step == 1:\n            raise ValueError('enough of it')\n"
    script = SPAWNS.replace("        optimizer.step()\n", fails)
    done = run(tmp_path, "train.py", str(free_port), options=("--every", "1"), script=script)
    assert done.returncode == 1
    assert "ValueError: enough of it" in done.stderr
    found = open_run(tmp_path / "out")
    assert found.status == "failed"
    assert re.search(r"failed \((first rank 1: )?ValueError: enough of it\)", found.ends.words)
    assert "nor in 15 s more" not in " ".join(found.events("ranks_apart")["message"].tolist())


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_data_loader_workers_open_no_run(tmp_path, method):
    done = run(tmp_path, "train.py", method, script=LOADER)
    assert (done.returncode, quiet(done.stderr)) == (0, "narrowgauge: the run is in out\n")
    assert steps(tmp_path / "out") == 4
    assert sorted(p.name for p in (tmp_path / "out").glob("*run*")) == ["run.json"]
    assert not list((tmp_path / "out").glob("process-*"))


@pytest.mark.parametrize("whose", ["own", "given"])
@pytest.mark.parametrize("method", [m for m in multiprocessing.get_all_start_methods() if m != "fork"])
def test_a_process_that_trains_what_it_was_prepared_with_is_watched_from_its_first_step(tmp_path, method, whose):
    done = run(tmp_path, "train.py", method, whose, options=("--every", "1"), script=TRAINS_ELSEWHERE)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out").glob("process-*")
    found = open_run(folder)
    assert (found.status, found.meta["steps"]) == ("complete", 3)
    assert all(0 < loss < 10 for loss in found.scalars("loss")["loss"].tolist())
    assert found.tensors(["numel"], sites=["(model):input"])["numel"].tolist() == [4 * 32] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_forked_child_trains_unwatched(warm_python, tmp_path, compiled):
    made = "model.compile(backend='eager')\noptimizer =" if compiled else "optimizer ="
    options = ("--every", "1", "--steps", "3")  # what is still watched would be ended after three steps
    done = run(tmp_path, "train.py", options=options, script=FORKS.replace("optimizer =", made, 1), warm=warm_python)
    assert (done.returncode, quiet(done.stderr)) == (0, "narrowgauge: the run is in out\n")
    assert done.stdout == "hooks in the child: 0\nthe child made 5 steps\n"
    assert steps(tmp_path / "out") == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_that_exits_says_nothing_of_ours(tmp_path):
    script = FORKS.replace("os._exit(0)", "raise SystemExit(3)").replace("os.wait()", "print(os.wait()[1] >> 8)")
    done = run(tmp_path, "train.py", options=("--every", "1"), script=script)
    assert (done.returncode, quiet(done.stderr)) == (0, "narrowgauge: the run is in out\n")
    assert done.stdout == "hooks in the child: 0\nthe child made 5 steps\n3\n"
    assert steps(tmp_path / "out") == 3
    assert open_run(tmp_path / "out").status == "complete"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_where_only_a_forked_child_trains_that_is_told(tmp_path):
    script = FORKS.replace("train(2)", "").replace("train(1)", "")
    done = run(tmp_path, "train.py", options=("--every", "1"), script=script)
    assert (done.returncode, done.stdout) == (0, "hooks in the child: 0\nthe child made 5 steps\n")
    [told] = open_run(tmp_path / "out").meta["not_found"]
    assert told.startswith("No step was seen: no torch.optim optimizer stepped. What a forked child trains is not seen")
    assert told in quiet(done.stderr)


COMPILES_ELSEWHERE = """
import os
from torch._inductor.async_compile import AsyncCompile
workers = AsyncCompile.process_pool()
print(sorted({workers.submit(os.getpid).result() for _ in range(8)} - {os.getpid()}) != [])
loaded = "[name in __import__('sys').modules for name in ('torch', 'narrowgauge.session')]"
print(workers.submit(eval, loaded).result())
"""


def test_a_compilers_workers_open_no_run(tmp_path):
    done = run(tmp_path, "train.py", script=f"{COMPILES_ELSEWHERE}\nworkers.shutdown()\n{programs.BASIC}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["True", "[True, False]"]  # they are other processes, and have torch
    assert steps(tmp_path / "out") == 8
    assert not list((tmp_path / "out").glob("process-*"))


@pytest.mark.parametrize("code", [0, 7])
def test_a_program_that_never_steps_is_told_and_keeps_its_code(warm_python, tmp_path, code):
    script = f"{programs.NO_STEP}\nimport sys\nprint('finished')\nsys.exit({code})\n"
    done = run(tmp_path, "train.py", options=("--every", "1"), script=script, warm=warm_python)
    plain = warm_python.run([sys.executable, "train.py"], cwd=tmp_path, env=PLAIN)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (code, "finished\n")
    told = "No step was seen: no torch.optim optimizer stepped."
    nothing = f"nothing was recorded{' before the command ended (exit code 7)' if code else ''}"
    assert done.stderr == f"narrowgauge: {told}\nnarrowgauge: the run is in out; {nothing}\n"
    found = open_run(tmp_path / "out")
    assert (found.status, found.meta["steps"], found.meta["not_found"]) == ("complete", 0, [told])
    assert (found.scalars().rows, found.metrics) == (0, ())


PATCHES = """
import atexit, sys, torch
from torch import nn
method, function, calls = torch.Tensor.backward, torch.autograd.backward, []
def own_method(tensor, *args, **kwargs):
    calls.append("method")
    return method(tensor, *args, **kwargs)
def patch():
    current = torch.autograd.backward
    def own_function(*args, **kwargs):
        calls.append("function")
        return current(*args, **kwargs)
    torch.Tensor.backward, torch.autograd.backward = own_method, own_function
    # asked behind whatever else happens at the end
    kept = lambda: print(torch.Tensor.backward is own_method, torch.autograd.backward is own_function)
    atexit.register(kept)
torch.manual_seed(3)
model = nn.Linear(32, 32)
if sys.argv[1] == "before":
    patch()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[1] == "after":
    patch()
for step in range(3):
    for x in torch.ones(2, 16, 32):
        loss = (model(x) - step).square().mean()
        loss.backward()
        print(loss.item())
    optimizer.step()
    optimizer.zero_grad()
print(calls)
"""


@pytest.mark.parametrize("when", ["before", "after"])  # the optimizer is made, with which the watch begins
def test_a_program_that_patches_backward_is_as_without_us_and_its_losses_are_heard(warm_python, tmp_path, when):
    done = run(tmp_path, "train.py", when, options=("--every", "1"), script=PATCHES, warm=warm_python)
    plain = warm_python.run([sys.executable, "train.py", when], cwd=tmp_path, env=PLAIN)
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "narrowgauge: the run is in out\n")
    *said, calls, kept = plain.stdout.splitlines()
    assert (calls, kept) == (str(["method", "function"] * 6), "True True")
    losses = [float(line) for line in said]
    table = open_run(tmp_path / "out").scalars()
    assert table["loss"].tolist() == pytest.approx([a + b for a, b in zip(losses[::2], losses[1::2], strict=True)])
    assert table["microbatches"].tolist() == [2, 2, 2]


def test_a_script_that_replaces_pythonpath_is_told_what_to_write_and_is_watched_with_that(warm_python, tmp_path):
    (tmp_path / "train.py").write_text(programs.BASIC)
    (tmp_path / "train.sh").write_text(f"PYTHONPATH=. {sys.executable} train.py\n")
    done = run(tmp_path, "sh", "train.sh", warm=warm_python)
    told = "takes our entry out of PYTHONPATH (write PYTHONPATH=.:$PYTHONPATH in its place)"
    assert (done.returncode, told in done.stderr) == (0, True)
    (tmp_path / "train.sh").write_text(f"PYTHONPATH=.:$PYTHONPATH {sys.executable} train.py\n")
    shutil.rmtree(tmp_path / "out")
    done = run(tmp_path, "sh", "train.sh", warm=warm_python)
    assert quiet(done.stderr) == "narrowgauge: the run is in out\n"


@pytest.mark.parametrize("code", [0, 7])
def test_what_never_trains_is_told_and_keeps_its_code(tmp_path, code):
    done = run(tmp_path, "train.py", script=f"import sys\nprint('hello')\nsys.exit({code})\n")
    assert (done.returncode, done.stdout) == (code, "hello\n")
    told = "narrowgauge: nothing was watched: no Python process below this command made a torch.optim optimizer that "
    told += "could be watched before the command ended"
    later = ". One that is still running may record into out. A program that"
    assert done.stderr.startswith(told + (" (exit code 7).\n" if code else later))
    assert (tmp_path / "out").exists() is (code == 0)  # what failed is tried again, with the same --out


def test_the_part_of_a_rank_whose_first_is_elsewhere_is_told_as_such(warm_python, tmp_path):
    env = {**PLAIN, "RANK": "1", "WORLD_SIZE": "2"}  # as a launcher on the second of two machines has it
    done = run(tmp_path, "train.py", script=programs.BASIC, env=env, warm=warm_python)
    told = "rank 0 of 2 recorded nothing here, so this is the part of rank 1 of 2 alone"
    assert quiet(done.stderr) == f"narrowgauge: {told}; what was written is kept.\nnarrowgauge: the run is in out\n"
    with pytest.warns(UserWarning, match=told):
        assert open_run(tmp_path / "out").scalars("loss").rows == 8


def test_an_error_looks_as_without_us(warm_python, tmp_path):
    done = run(tmp_path, "train.py", script=programs.RAISES)
    plain = warm_python.run([sys.executable, "train.py"], cwd=tmp_path, env=PLAIN)
    assert done.returncode == plain.returncode == 1
    assert quiet(done.stderr) == plain.stderr + "narrowgauge: the run is in out\n"
    found = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (found["status"], found["meta"]["error"]) == ("failed", "ValueError: the loader is empty")


def test_an_error_that_cannot_say_what_it_is_looks_as_without_us_and_its_run_is_closed(warm_python, tmp_path):
    mute = "class Mute(Exception):\n    def __str__(self):\n        raise ValueError('no words')\nraise Mute"
    script = programs.BASIC.replace('print("finished")', mute)
    done = run(tmp_path, "train.py", script=script, warm=warm_python)
    plain = warm_python.run([sys.executable, "train.py"], cwd=tmp_path, env=PLAIN)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert quiet(done.stderr) == plain.stderr + "narrowgauge: the run is in out\n"
    found = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (found["status"], found["meta"]["error"]) == ("failed", "Mute: <exception str() failed>")


def test_a_warning_names_the_line_that_it_names_without_us(warm_python, tmp_path):
    """Whichever optimizer it is: the first one is met before there is a session, the second in it."""
    (tmp_path / "train.py").write_text(WARNS)
    plain = warm_python.run([sys.executable, "train.py"], cwd=tmp_path, env=PLAIN)
    done = run(tmp_path, "train.py", warm=warm_python)
    assert done.stdout == plain.stdout
    assert plain.stdout.count("sgd.py") == 2


def test_a_conversion_that_cannot_be_done_ends_it_in_words(warm_python, tmp_path):
    script = programs.BASIC.replace("64", "60").replace("(32,", "(30,").replace("24, 32", "24, 30")
    done = run(tmp_path, "train.py", options=("--convert", "current"), script=script, warm=warm_python)
    assert (done.returncode, done.stdout) == (1, "")
    first, last = quiet(done.stderr).splitlines()
    said = "narrowgauge: --convert: none of the 3 linear layers of Sequential can be converted ('0', '2': N=60 is not"
    assert first.startswith(said)
    assert first.endswith("The program was ended; without --convert it is watched as it is.")
    assert last == "narrowgauge: nothing was trained, so there is no run; out can be used again"
    assert not (tmp_path / "out").exists()
    again = run(tmp_path, "train.py", options=("--convert", "current"), script=programs.BASIC, warm=warm_python)
    assert again.returncode == 0
    assert quiet(again.stderr) == (
        "narrowgauge: 3 of 3 linear layers in FP8 (current, emulated)\nnarrowgauge: the run is in out\n"
    )


def test_a_conversion_that_cannot_be_done_leaves_what_is_the_program_s(warm_python, tmp_path):
    script = "open('out/mine.txt', 'w').close()\n" + EVALUATES
    done = run(tmp_path, "train.py", options=("--convert", "current"), script=script, warm=warm_python)
    assert done.returncode == 1
    assert quiet(done.stderr).splitlines()[-1] == (
        "narrowgauge: nothing was trained, so there is no run; other files are left in out"
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_program_that_works_elsewhere_is_recorded_where_it_was_asked_for(warm_python, tmp_path):
    script = "import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\n" + programs.BASIC
    done = run(tmp_path, "train.py", script=script, warm=warm_python)
    assert done.returncode == 0
    assert steps(tmp_path / "out") > 0
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_program_that_leaves_by_os_exit_has_all_of_its_steps(warm_python, tmp_path):
    script = programs.BASIC + "import os\nsys.stdout.flush()\nos._exit(3)\n"
    done = run(tmp_path, "train.py", options=("--every", "4"), script=script, warm=warm_python)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (3, "finished")
    assert quiet(done.stderr) == "narrowgauge: the run is in out\n"
    found = open_run(tmp_path / "out")
    assert (found.status, found.meta["error"]) == ("failed", "os._exit(3)")
    assert found.scalars("loss")["step"].tolist() == list(range(1, 9))
    assert set(found.tensors()["step"].tolist()) == {4, 8}


UNPICKLED = """
import sys, torch
from torch import nn
if sys.argv[1:] == ["save"]:
    model = nn.Linear(16, 16)
    torch.save((model, torch.optim.Adam(model.parameters())), "both.pt")
    sys.exit()
model, optimizer = torch.load("both.pt", weights_only=False)
for _ in range(3):
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
"""


def test_an_optimizer_that_is_only_unpickled_is_heard(warm_python, tmp_path):
    (tmp_path / "train.py").write_text(UNPICKLED)
    assert subprocess.run([sys.executable, "train.py", "save"], cwd=tmp_path, env=PLAIN, check=False).returncode == 0
    words = ["run", "--every", "1", "--out", "out", "--", "python", "train.py"]
    done = warm_python.narrowgauge(words, cwd=tmp_path, env=PLAIN)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "out")
    assert run.scalars("tokens")["tokens"].tolist() == [4, 4, 4]
    assert run.meta["not_found"] == []


def test_a_folder_that_holds_a_run_is_not_taken_and_nothing_runs(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    done = run(tmp_path, "train.py", script="open('ran', 'w')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "narrowgauge: out is not empty; give another folder with --out, or delete it first.\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.py"]


def test_steps_end_it_cleanly(warm_python, tmp_path):
    done = run(tmp_path, "train.py", options=("--steps", "3"), script=programs.BASIC, warm=warm_python)
    assert done.returncode == 0
    assert "finished" not in done.stdout
    assert "Traceback" not in done.stderr
    assert steps(tmp_path / "out") == 3


def test_another_sitecustomize_still_runs_and_ours_is_nowhere(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 'theirs'\n")
    script = (
        "import sys, sitecustomize\nprint(theirs, sitecustomize.__file__)\n"
        "print([p for p in sys.path if 'inject' in p], [m for m in sys.modules if 'narrowgauge' in m])\n"
    )
    done = run(tmp_path, "train.py", script=script, env=with_path(site))
    assert done.stdout.splitlines() == [f"theirs {site / 'sitecustomize.py'}", "[] []"]


def test_a_broken_sitecustomize_is_told_as_python_tells_it(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import no_such_module\n")
    done = run(tmp_path, "train.py", script="print('hello')\n", env=with_path(site))
    assert done.stdout == "hello\n"
    assert "no_such_module" in done.stderr


def test_no_such_program_is_one_message(tmp_path):
    done = run(tmp_path, "no-such-program", "train.py")
    assert done.returncode == 2
    assert "there is no program 'no-such-program' on this machine's PATH" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a first line names no program")
@pytest.mark.parametrize(
    ("text", "why"),
    [("echo hello\n", "a script that does not begin with"), ("#!/no/such/shell\n", "names, is not there")],
)
def test_what_cannot_be_started_is_one_message_and_leaves_nothing(tmp_path, text, why):
    (tmp_path / "train").write_text(text)
    (tmp_path / "train").chmod(0o755)
    done = run(tmp_path, "./train")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("narrowgauge: cannot start './train': ")
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_failed_command_leaves_no_folder_where_it_was_to_be_exported_either(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    (tmp_path / "ng.toml").write_text("[export]\ntensorboard = true\n")
    done = run(tmp_path, "train.py", options=("--config", "ng.toml"), script="raise SystemExit(7)\n")
    assert done.returncode == 7
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["sys.exit(3)", "sys.excepthook = lambda *_: None; raise ValueError('odd')"])
def test_how_a_program_ended_is_known_whoever_tells_its_errors(tmp_path, how):
    done = run(tmp_path, "train.py", script=f"{programs.BASIC}import sys\n{how}\n")
    found = open_run(tmp_path / "out")
    assert done.returncode == (3 if "exit" in how else 1)
    assert f"The command ended: exit code {done.returncode}." in found.meta["notes"]
    assert (found.status, found.meta["error"]) == (("failed", "ValueError: odd") if "odd" in how else ("complete", ""))
    told = "with an error: ValueError: odd" if "odd" in how else "with exit code 3"
    assert how_it_ended(found) == told
    assert single({"out": found})[0]["status"] == told.partition(":")[0]


def test_the_exit_code_of_what_else_a_command_does_is_not_its_programs(tmp_path):
    (tmp_path / "train.sh").write_text(f"{sys.executable} train.py\nexit 4\n")
    done = run(tmp_path, "sh", "train.sh", script=programs.BASIC)
    found = open_run(tmp_path / "out")
    assert done.returncode == 4
    assert found.meta["notes"][-1] == "The command ended: exit code 4."
    assert how_it_ended(found) == "at its end"


def test_of_a_program_that_is_killed_before_its_first_row_it_is_told_that_nothing_was_recorded(tmp_path):
    dies = "import os, torch\ntorch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1)\nos.kill(os.getpid(), 9)\n"
    done = run(tmp_path, "train.py", script=dies)
    assert done.returncode == 137
    nothing = "; nothing was recorded before the command ended (killed by SIGKILL (often: out of memory))\n"
    assert done.stderr.endswith(f"narrowgauge: the run is in out{nothing}")


def test_a_program_may_empty_its_environment(tmp_path):
    done = run(tmp_path, "train.py", script="import os\nos.environ.clear()\n" + programs.BASIC)
    assert (done.returncode, quiet(done.stderr)) == (0, "narrowgauge: the run is in out\n")
    assert steps(tmp_path / "out") == 8


RANKS = """
import os, subprocess, sys
if len(sys.argv) == 1:  # a launcher: a crash of both ranks and what elastic does then, and a second training
    for again, count in (("0", 2), ("1", 2), ("0", 2)):
        environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": again}
                        for rank in range(count)]
        for child in [subprocess.Popen([sys.executable, __file__, "train"], env=e) for e in environments]:
            child.wait()
    sys.exit()
import torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 16)).square().mean().backward()
optimizer.step()
"""


def test_ranks_that_are_started_again_are_one_run_of_their_own_and_told(tmp_path):
    done = run(tmp_path, "train.py", script=RANKS)
    assert done.returncode == 0, done.stderr
    inside = sorted(path.name for path in (tmp_path / "out").iterdir() if "-" in path.name)
    assert len(inside) == 2
    assert inside[0].startswith("process-")
    assert inside[1] == "restart-1"
    told = f"narrowgauge: the run is in out; inside of it are those of processes that began later: {', '.join(inside)}"
    assert quiet(done.stderr).splitlines()[-1] == told
    for name in ("", *inside):
        assert {path.name for path in (tmp_path / "out" / name).glob("run*.json")} == {"run.json", "run.rank1.json"}
        assert steps(tmp_path / "out" / name) == 1


def test_a_backend_that_cannot_run_here_ends_it_in_words(warm_python, tmp_path):
    (tmp_path / "ng.toml").write_text('[convert]\nbackend = "fused"\n')
    options = ("--convert", "current", "--config", "ng.toml")
    done = run(tmp_path, "train.py", options=options, script=programs.BASIC, warm=warm_python)
    assert done.returncode == 1
    assert done.stderr.startswith("narrowgauge: --convert: backend 'fused' cannot run recipe 'current' on 'cpu'")
    assert "Traceback" not in done.stderr


def test_the_watch_that_cannot_write_leaves_the_program_alone(warm_python, tmp_path):
    script = "import shutil\nshutil.rmtree('out')\nopen('out', 'w').close()\n" + programs.BASIC
    done = run(tmp_path, "train.py", script=script, warm=warm_python)
    assert done.returncode == 0
    assert done.stdout.endswith("finished\n")
    assert "narrowgauge: this process is not watched:" in done.stderr
    assert done.stderr.endswith("out was removed while the command ran, and what was recorded with it.\n")
    assert Path(tmp_path / "out").is_file()


COMPILED = """
import sys, torch
from torch import nn
from torch._dynamo.utils import counters
how = sys.argv[1]
class Block(nn.Module):  # of torch's own modules that compile themselves in place, nothing is compiled
    def __init__(self, k, n):
        super().__init__()
        self.linear = nn.Linear(k, n)
    def forward(self, x):
        return self.linear(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Block(64, 128), Block(128, 64)
    def forward(self, x):
        return self.down(self.up(x).relu())
torch.manual_seed(0)
model = Net()
early = sys.argv[2] == "early"
optimizer = None if early else torch.optim.AdamW(model.parameters(), lr=1e-3)
called = model
if how == "module":
    called = torch.compile(model, backend="aot_eager")
elif how == "in place":
    model.compile(backend="aot_eager")
elif how == "blocks":
    for block in (model.up, model.down):
        block.compile(backend="aot_eager")
def loss_of(x):
    return (called(x) - x).square().mean()
if how == "function":
    loss_of = torch.compile(loss_of, backend="aot_eager")
optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(6):
    loss_of(torch.randn(32, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
print(counters["stats"]["unique_graphs"], "graphs", sum(counters["graph_break"].values()), "breaks")
"""


@pytest.fixture(scope="module")
def compiled_alone(warm_python, tmp_path_factory):
    """What COMPILED prints unwatched, by how it compiles."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "train.py").write_text(COMPILED)
    return cache(lambda how: warm_python.run([sys.executable, "train.py", how, "late"], cwd=folder, env=PLAIN).stdout)


@pytest.mark.parametrize("when", ["early", "late"])  # before the optimizer is made, or after
@pytest.mark.parametrize("how", ["module", "in place", "function", "blocks"])
def test_what_is_compiled_has_the_graphs_and_breaks_that_it_has_without_us(
    warm_python, tmp_path, compiled_alone, how, when
):
    (tmp_path / "train.py").write_text(COMPILED)
    alone = compiled_alone(how)
    assert alone == f"{2 if how == 'blocks' else 1} graphs 0 breaks\n"
    warm = None if (how, when) == ("module", "late") else warm_python  # one that starts as programs do
    done = run(tmp_path, "train.py", how, when, warm=warm)
    assert (done.returncode, quiet(done.stderr)) == (0, "narrowgauge: the run is in out\n")
    assert done.stdout == alone
    assert steps(tmp_path / "out") == 6
    (tmp_path / "out").rename(tmp_path / "watched")
    done = run(tmp_path, "train.py", how, when, options=("--convert", "current", "--every", "2"), warm=warm_python)
    assert (done.returncode, done.stdout, quiet(done.stderr)) == (
        0,
        alone,
        "narrowgauge: 2 of 2 linear layers in FP8 (current, emulated)\nnarrowgauge: the run is in out\n",
    )
    found = open_run(tmp_path / "out")
    assert {2, 4, 6} == set(found.tensors()["step"].tolist())
    assert found.meta["baseline_dtype"] == "float32"
    assert [row["recipe"] for row in found.meta["conversion"]] == ["current", "current"]


TERMINATED = """
import os, signal, sys, time
def end(*_):
    os.write(1, b"ended by hand\\n")  # print may still be busy with what is below
    sys.exit(5)
signal.signal(getattr(signal, sys.argv[1]), end)
print("ready", flush=True)
while True:
    time.sleep(0.1)  # a signal that comes just before a sleep does not end it
"""


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_us_reaches_the_program_which_ends_as_it_likes(tmp_path, sent):
    (tmp_path / "train.py").write_text(TERMINATED)
    command = [*NARROWGAUGE, "run", "--out", "out", "--", "train.py", sent]
    parent = subprocess.Popen(
        command, cwd=tmp_path, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(getattr(signal, sent))
    out, _ = parent.communicate(timeout=60)
    assert (out, parent.returncode) == ("ended by hand\n", 5)


NO_LINEAR = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU())
spare = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4, 16)).sum().backward()
    optimizer.step()
"""


def test_gpus_are_left_asleep_until_the_program_wakes_them(warm_python, tmp_path):
    # To ask a GPU's name wakes it, and what forks afterwards cannot use it any more.
    script = (
        "import torch\nfrom unittest import mock\n"
        "def woken(*args, **kwargs):\n    raise SystemExit('a GPU was asked for')\n"
        "for name in ('is_available', 'get_device_name', 'get_device_capability', 'device_count'):\n"
        "    setattr(torch.cuda, name, woken)\n"
    )
    done = run(tmp_path, "train.py", script=script + NO_LINEAR, warm=warm_python)
    assert (done.returncode, quiet(done.stderr)) == (0, "narrowgauge: the run is in out\n")


def test_what_a_program_filters_stays_filtered(warm_python, tmp_path):
    script = (
        "import warnings\n" + NO_LINEAR + "warnings.simplefilter('error')\nimport atexit\n"
        "before = list(warnings.filters)\nfrom narrowgauge.session.process.live import Live\nLive.current.close()\n"
        "ours = [f for f in warnings.filters if f[1] and 'global hooks' in f[1].pattern]\n"
        "print(ours, warnings.filters[0][0])\n"
    )
    assert run(tmp_path, "train.py", script=script, warm=warm_python).stdout == "[] error\n"


SETTINGS = """
[watch]
every = 2
sites = ["0:weight", "fc9"]
"""


def test_a_settings_file_travels_to_the_program_and_what_it_asks_in_vain_is_told(warm_python, tmp_path):
    (tmp_path / "ng.toml").write_text(SETTINGS)
    done = run(tmp_path, "train.py", options=("--config", "ng.toml"), script=programs.BASIC, warm=warm_python)
    assert done.returncode == 0, done.stderr
    said = "watch.sites: 'fc9' matched nothing in this program; there are: '0', '2', '4'."
    assert quiet(done.stderr) == f"narrowgauge: ng.toml: {said}\nnarrowgauge: the run is in out\n"
    assert said in open_run(tmp_path / "out").meta["notes"]
    table = open_run(tmp_path / "out").tensors()
    assert set(zip(table["step"].tolist(), table["site"], strict=True)) == {(n, "0:weight") for n in (2, 4, 6, 8)}


def test_a_wrong_settings_file_is_told_before_anything_runs(tmp_path):
    (tmp_path / "ng.toml").write_text("[watch]\nrole = ['input']\n")
    done = run(tmp_path, "train.py", options=("--config", "ng.toml"), script="open('ran', 'w')")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ng.toml:2: watch.role: there is no such key; did you mean 'roles'?" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
