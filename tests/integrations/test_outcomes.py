"""The README's table is what passed: each way in which a row can stop to hold is told, and ends the tests."""

import re
import subprocess
import sys

import pytest
from tests.integrations.outcomes import Outcomes, read, transcript, write
from tests.integrations.watched import DEVICE
from tests.integrations.works_with import ROOT, WorksWith, pinned

KEY = ("A program", "a loop")
COMPARED = {"versions": pinned(["torch"]), "on": "2 ranks", "converted": True}
WATCHED, CONVERTED = "test_a.py::test_it_is_watched", "test_a.py::test_it_is_converted"


def outcomes(*ends, compared=(COMPARED,)):
    """Of tests of that program that ended so."""
    found = Outcomes()
    for test, end in ends:
        found.add(test, "setup", "skipped" if end == "skipped" else "passed", [(*KEY, [])])
        if end != "skipped":
            found.add(test, "call", end, [(*KEY, list(compared))])
            found.add(test, "teardown", "passed", [(*KEY, list(compared))])
    return found


BOTH = ((WATCHED, "passed"), (CONVERTED, "passed"))


@pytest.fixture
def committed():
    return outcomes(*BOTH).rows()


def test_a_row_says_what_was_compared_and_which_tests_passed(committed):
    assert committed == [{"program": KEY[0], "seen": KEY[1], **COMPARED, "tests": [CONVERTED, WATCHED]}]
    plain = {**COMPARED, "on": "1 process", "converted": False}
    (row,) = outcomes((WATCHED, "passed"), compared=[plain, COMPARED]).rows()
    assert (row["on"], row["converted"]) == ("1 process, 2 ranks", True)
    assert list(outcomes(*BOTH, ("test_a.py::test_new", "passed")).wrong(committed, {"test_a.py"})) == []


@pytest.mark.parametrize(
    ("ends", "compared", "told"),
    [
        ((BOTH[0], (CONVERTED, "failed")), COMPARED, f"{CONVERTED} failed"),
        ((BOTH[0], (CONVERTED, "skipped")), COMPARED, f"{CONVERTED} skipped"),
        (BOTH[:1], COMPARED, f"{CONVERTED} did not run"),
        ((), COMPARED, f"{CONVERTED} did not run; {WATCHED} did not run"),
        (BOTH, {**COMPARED, "on": "1 process"}, "on '1 process', not '2 ranks'"),
        (BOTH, {**COMPARED, "converted": False}, "converted False, not True"),
        (BOTH, {**COMPARED, "versions": {"torch": "1.0"}}, "versions {'torch': '1.0'}, not "),
        (BOTH, None, "nothing was compared"),
    ],
)
def test_a_row_that_was_not_proven_again_is_told(committed, ends, compared, told):
    found = outcomes(*ends, compared=[compared] if compared else [])
    (line,) = found.wrong(committed, {"test_a.py"})
    assert line.startswith(f"{KEY[0]} ({KEY[1]}): {told}")
    assert list(found.wrong(committed, {"test_b.py"})) == []  # it was not asked for


def test_what_has_no_row_yet_is_told():
    assert list(outcomes(*BOTH).wrong([], {"test_a.py"})) == [f"{KEY[0]} ({KEY[1]}): passed, and has no row"]


def test_a_row_whose_packages_are_missing_is_not_looked_at(committed, monkeypatch):
    monkeypatch.setattr("tests.integrations.works_with.installed", lambda package: None)
    assert list(outcomes(*((test, "skipped") for test, _ in BOTH)).wrong(committed, {"test_a.py"})) == []


def test_what_did_not_pass_is_not_written():
    for found, why in (
        (outcomes(BOTH[0], (CONVERTED, "failed")), "failed"),
        (outcomes((WATCHED, "skipped")), "skipped"),
        (outcomes(*BOTH, compared=[]), "nothing was compared"),
    ):
        assert list(found.unproven()) == [f"{KEY[0]} ({KEY[1]}): {why}"]
    assert list(outcomes(*BOTH).unproven()) == []


def test_what_a_module_names_as_code_stands_in_what_is_launched():
    works = WorksWith("A program", ("torch",), "`launcher`, accumulation, strategy `ddp`")
    assert works.unsaid("launcher --strategy ddp") == []
    assert works.unsaid("launcher --strategy fsdp") == ["ddp"]


@pytest.mark.parametrize("wrong", ["a, Linear\n  FAILED\n1 of 2 cases", "a, Linear\n2 of 2 cases", "1 of 1 cases"])
def test_a_transcript_with_a_case_that_failed_or_is_missing_is_none(tmp_path, wrong):
    file = tmp_path / "transcript.txt"
    head = "# 2 x NVIDIA H200, torch 2.11.0+cu130, a_package 1.2.3, 2026-11-27"
    file.write_text(f"{head}\na, Linear\n  fine\n1 of 1 cases as they should be\n")
    found = transcript(file, ["a-package"])
    assert (found["on"], found["cases"], found["versions"]) == ("2 GPUs", ["a, Linear"], {"a-package": "1.2.3"})
    file.write_text(f"# NVIDIA H200, a_package 1.2.3\n{wrong} as they should be\n")
    with pytest.raises(ValueError):
        transcript(file, ["a-package"])


@pytest.mark.skipif(DEVICE != "cpu", reason="rows are compared where programs train on the CPU")
def test_a_run_in_which_all_tests_pass_fails_if_the_table_is_not_what_they_prove(tmp_path):
    file = tmp_path / "rows.json"
    write([], file)
    words = ["tests/integrations/test_transformer_engine.py", "--outcomes", str(file), "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    assert "1 passed" in done.stdout
    assert re.search(r"^TransformerEngine \(.*\): passed, and has no row$", done.stdout, re.MULTILINE)
    assert done.returncode == 1
    assert read(file) == []
