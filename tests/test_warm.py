"""A fork of the warm process is to its program what a process of its own is."""

import os
import subprocess
import sys

from tests.warm import READ_ONCE

PROGRAM = """
import atexit, os, sys, threading, time
print("torch" in sys.modules, sys.argv, __name__, __file__, os.getcwd(), os.environ["OWN"])
print([entry for entry in sys.path if "site-packages" not in entry])
import early
import torch
from torch import nn
print(nn.Linear.__module__, torch.__spec__.name, "torch" in sys.modules)
atexit.register(print, "the end")
threading.Thread(target=lambda: time.sleep(0.2) or print("the last thread")).start()
print("told", file=sys.stderr)
sys.exit(7)
"""
EARLY = "import sys\nprint('torch' in sys.modules, __name__)\n"


def warm_environment():
    return {name: value for name, value in os.environ.items() if name.startswith(READ_ONCE)}


def both(warm_python, folder, program):
    (folder / "train.py").write_text(program)
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text("print('at the start')\n")
    (folder / "early.py").write_text(EARLY)
    words, env = (
        [sys.executable, "train.py", "--lr", "1"],
        warm_environment() | {"OWN": "1", "PYTHONPATH": str(folder / "path")},
    )
    real = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    found = warm_python.run(words, cwd=folder, env=env)
    assert (found.returncode, found.stdout, found.stderr) == (real.returncode, real.stdout, real.stderr)
    return found


def test_it_begins_and_ends_like_a_process(warm_python, tmp_path):
    found = both(warm_python, tmp_path, PROGRAM)
    assert found.returncode == 7
    assert found.stdout.startswith("at the start\nFalse ['train.py', '--lr', '1'] __main__ ")
    assert found.stdout.endswith("the last thread\nthe end\n")
    assert found.stderr == "told\n"


def test_an_error_is_shown_as_python_shows_it(warm_python, tmp_path):
    found = both(warm_python, tmp_path, "import early\nraise ValueError('no data')\n")
    assert found.returncode == 1
    assert found.stderr.startswith("Traceback (most recent call last):\n  File")


def test_words_instead_of_a_code(warm_python, tmp_path):
    found = both(warm_python, tmp_path, "import early, sys\nsys.exit('no data')\n")
    assert (found.returncode, found.stderr) == (1, "no data\n")


def test_a_signal_is_the_end_that_it_is(warm_python, tmp_path):
    (tmp_path / "train.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert warm_python.run([sys.executable, "train.py"], cwd=tmp_path).returncode == -9


def test_numbers_that_nobody_seeded_are_others_every_time(warm_python, tmp_path):
    program = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    (tmp_path / "train.py").write_text(program)
    said = [warm_python.run([sys.executable, "train.py"], cwd=tmp_path).stdout.split() for _ in range(2)]
    assert len({*said[0], *said[1]}) == 6


def test_what_is_set_up_otherwise_is_a_process_of_its_own(warm_python, tmp_path):
    (tmp_path / "train.py").write_text("import os, sys\nprint(os.getppid(), 'numpy' in sys.modules)\n")
    words = [sys.executable, "train.py"]
    compiled = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # as torch leaves it in a process that compiles
    for env in (None, compiled):
        assert warm_python.run(words, cwd=tmp_path, env=env).stdout == f"{warm_python.pid} True\n"
    found = warm_python.run(words, cwd=tmp_path, env={**os.environ, "TORCHDYNAMO_DISABLE": "1"})
    assert found.stdout == f"{os.getpid()} False\n"


def test_temporary_files_are_where_the_environment_says(warm_python, tmp_path):
    (tmp_path / "train.py").write_text("import tempfile\nprint(tempfile.gettempdir())\n")
    env = warm_environment() | {"TMPDIR": str(tmp_path)}
    assert warm_python.run([sys.executable, "train.py"], cwd=tmp_path, env=env).stdout == f"{tmp_path}\n"
