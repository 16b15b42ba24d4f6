"""What every Python below a watched program imports first: harmless and silent in whichever version that is."""

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from narrowgauge.session.process.launch import INJECTED

SOURCE = INJECTED / "sitecustomize.py"
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
VERSIONS = ("2.7", "3.6", "3.7", "3.8", "3.9", "3.10", "3.12", "3.13")


def interpreter(version):
    """A Python of that version on this machine, or none."""
    kept = sorted(PYENV.glob(f"{version}.*/bin/python"))  # where its shims may be switched off
    return str(kept[0]) if kept else shutil.which(f"python{version}")


@pytest.fixture(params=VERSIONS)
def another(request):
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} here")
    return python


def run(python, code, *paths):
    return subprocess.run(
        [python, "-B", "-c", code], text=True, capture_output=True, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, (INJECTED, *paths))),
             "NARROWGAUGE_PLAN": "no-such-plan"},
    )  # fmt: skip


def test_any_python_starts_as_without_it(another):
    done = run(another, "import sys; print([p for p in sys.path if 'inject' in p])")
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


def test_the_next_of_its_name_is_imported_by_any_python(another, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.theirs = 'theirs'\n")
    done = run(another, "import os, sitecustomize; print(os.theirs + ' ' + sitecustomize.__file__)", tmp_path)
    assert (done.stdout, done.stderr) == (f"theirs {tmp_path / 'sitecustomize.py'}\n", "")


def test_an_old_python_that_trains_is_told_why_it_is_not_watched(another, tmp_path):
    (tmp_path / "torch.py").write_text("name = 'a torch'\n")
    done = run(another, "import torch; print(torch.name)", tmp_path)
    assert done.stdout == "a torch\n"
    version = tuple(map(int, Path(another).resolve().name.removeprefix("python").split(".")))
    if version < (3,):
        assert done.stderr == ""
    elif version < (3, 11):
        why = f"RuntimeError: this is Python {version[0]}.{version[1]}, and narrowgauge needs 3.11"
        assert done.stderr == f"narrowgauge: this process is not watched: {why}\n"
    else:
        assert "narrowgauge: this process is not watched: ModuleNotFoundError" in done.stderr


def test_it_has_no_words_that_only_a_newer_python_reads():
    newer = (ast.JoinedStr, ast.NamedExpr, ast.AnnAssign, ast.Nonlocal, ast.AsyncFunctionDef, ast.Await, ast.YieldFrom)
    tree = ast.parse(SOURCE.read_text())
    found = [type(node).__name__ for node in ast.walk(tree) if isinstance(node, newer)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found += [f.name for f in functions if f.returns or f.args.kwonlyargs or any(a.annotation for a in f.args.args)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found += ["print" for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert found == []
    assert SOURCE.read_text().isascii()  # Python 2 reads nothing else without being told
