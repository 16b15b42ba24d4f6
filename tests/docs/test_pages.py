"""Docs are tests: their Python runs, their commands and links exist, generated pages are what the code says."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.integrations.outcomes import module, read
from tests.integrations.works_with import pinned

from narrowgauge.cli.main import VERBS, cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def command_lines(page: Path) -> list[str]:
    """Every command line of ours: lines of shell blocks and code spans that begin with our name and a verb."""
    text = page.read_text()
    lines = [line for body in blocks(page, "sh") for line in body.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    lines = [line.partition("#")[0].strip() for line in lines]
    return [line for line in lines if line.startswith("narrowgauge ")]


def command_of(words: list[str]) -> click.Command | None:
    """The command that a line calls: a verb's, or that of a verb's subject; None if it has no such subject."""
    command = cli.get_command(click.Context(cli), words[1])
    if isinstance(command, click.Group) and len(words) > 2:
        return command.commands.get(words[2])
    return command


def problem(line: str) -> str | None:
    """What is wrong with a command line, None if nothing is."""
    words = shlex.split(line)
    verb = words[1]
    if verb.startswith("-"):
        return None
    if verb not in VERBS:
        return f"no verb {verb!r}"
    ours = words[2 : words.index("--")] if "--" in words else words[2:]
    command = command_of(words)
    if command is None:
        return f"{verb} has no {words[2]!r}"
    known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    unknown = {word.partition("=")[0] for word in ours if word.startswith("-")} - known
    return f"{verb} has no {sorted(unknown)}" if unknown else None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for number, body in enumerate(blocks(page, "python"), 1):
        exec(compile(body, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=name)
def test_commands_and_flags_exist(page: Path):
    assert {line: found for line in command_lines(page) if (found := problem(line))} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("narrowgauge compare --out DIR -- train.py --any-flag", None),
        ("narrowgauge compose -- train.py", "no verb 'compose'"),
        ("narrowgauge bench step --peer torchao", None),
        ("narrowgauge bench speed", "bench has no 'speed'"),
        ("narrowgauge run --recipe current -- train.py", "run has no ['--recipe']"),
    ],
)
def test_the_check_of_commands_sees_what_it_looks_for(line: str, wrong: str | None):
    assert problem(line) == wrong


def test_every_verb_is_documented():
    documented = {shlex.split(line)[1] for line in command_lines(ROOT / "README.md")}
    assert documented == set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", FENCE.sub("", page.read_text()))
    targets = [target for target in targets if target and not target.startswith(("http:", "https:"))]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_index_leads_to_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_every_program_that_the_readme_says_is_watched_is_declared_by_its_tests_and_has_the_versions_of_today():
    """That these tests pass is checked where they run, and their packages may be missing here."""
    declared = {}
    for file in sorted((ROOT / "tests" / "integrations").glob("test_*.py")):
        tests = importlib.import_module(f"tests.integrations.{file.stem}")
        works = getattr(tests, "WORKS", ())
        for each in works if isinstance(works, tuple) else (works,):
            declared[each.name, each.seen] = file.name, getattr(tests, "ON_THE_GPU", None) or pinned(each.packages)
    assert {(row["program"], row["seen"]): (module(row), row["versions"]) for row in read()} == declared


def test_generated_pages_are_what_the_code_says():
    """In a process of its own: click remembers the first help text that it was asked for."""
    check = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
