"""The repository speaks of the project alone, and keeps what its front page promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import narrowgauge

ROOT = Path(__file__).resolve().parents[2]
# What is built or downloaded here; everything else belongs to the repository.
BUILT = {
    ".git", ".venv", ".whl", "__pycache__", "demo", "runs", "build", "dist",
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache",
}  # fmt: skip
BINARY = {".png", ".jpg", ".parquet", ".gz"}
# Written in two pieces, so that this file does not contain what it looks for.
FORBIDDEN = {
    # Ada is the person in our examples.
    "a path of some machine": r"(?<![\w.])/" + r"(work|root|home(?!/ada/)|Users|mnt|opt)/\w",
    "a package registry's host": r"(pypi\.|python" + r"hosted|download\.py" + r"torch|index-" + r"url)",
    "a number of an issue": r"\bissues? ?#?" + r"\d+\b",
}


def files(root: Path = ROOT) -> Iterator[Path]:
    """Every text file of the repository."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in BUILT and not f.endswith(".egg-info"))
        kept = sorted(name for name in names if name not in BUILT and Path(name).suffix not in BINARY)
        yield from (Path(folder) / name for name in kept)


def strays(text: str) -> list[str]:
    return [what for what, pattern in FORBIDDEN.items() if re.search(pattern, text)]


def test_no_file_speaks_of_anything_but_the_project():
    found = {str(path.relative_to(ROOT)): strays(path.read_text(errors="replace")) for path in files()}
    assert len(found) > 50
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "text",
    [
        "see /ro" + "ot/x.py",
        "at /wo" + "rk/main",
        "pip install --index-" + "url x",
        "issue" + " 7",
        "https://py" + "pi.org",
    ],
)
def test_the_search_sees_what_it_looks_for(text: str):
    assert strays(text)


def test_changelog_has_this_version():
    assert f"\n## {narrowgauge.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_version_is_said_once():
    assert f'\nversion = "{narrowgauge.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_licence_is_complete():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text) > 11_000


def test_contributing_is_one_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50


def test_readme_shows_both_commands_early():
    top = (ROOT / "README.md").read_text()[:2000]
    assert "make demo" in top
    assert "make test" in top


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(["make", "help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    listed = re.findall(r"^  make (\w+) +\S", shown.stdout, re.MULTILINE)
    assert set(listed) == targets == {"help", "demo", "test", "table", "lint", "bench", "soak", "docs", "clean"}
    assert len(listed) == len(targets)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_bench_takes_neither_the_soak_nor_what_only_a_gpu_can_run():
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    planned = subprocess.run(
        ["make", "-n", "bench"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    files = set(re.search(r"for file in (.*?); do ", planned)[1].split())
    every = {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
    others = {"benchmarks/record.py", "benchmarks/soak.py"}
    assert files == {name for name in every - others if not name.startswith("benchmarks/gpu_")}


def test_torch_is_installed_first_and_by_its_version():
    """Any other way may draw gigabytes that a machine without a GPU cannot use."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert next(line for line in lines if "pip install" in line).endswith(" -c constraints.txt")
    installs = [line for line in lines if line.startswith("\t$(INSTALL) ")]
    assert re.search(r"^\t\$\(INSTALL\) torch==\d+\.\d+\.\d+$", installs[0])
    pin = re.search(r"torch==\S+", installs[0])
    assert pin is not None
    assert f"\n{pin[0]}\n" in (ROOT / "constraints.txt").read_text()


def test_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("\nmake test")
