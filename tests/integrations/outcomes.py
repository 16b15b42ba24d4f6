"""What the tests of this folder did, row by row of the README's table, beside what works_with.json says that they do.

told        what a test says when it ends: its rows, and what was compared of each so far (works_with.py)
row         {program, seen, versions, on, converted, tests}, `tests` being those that passed; of a transcript also its
            name and the cases in it. None if nothing was compared, or if a test failed
wrong       a row of the file, if one of its tests did not pass this time or something else was compared; further
            tests may have come. A row whose packages are missing is not looked at
"""

import json
import re
from collections import defaultdict
from pathlib import Path

from tests.integrations.works_with import ROOT, missing

FILE = Path(__file__).with_name("works_with.json")


class Outcomes:
    """Of one run of the tests."""

    def __init__(self):
        self._ends = defaultdict(dict)  # (program, seen) -> test -> "passed", "failed", "skipped"
        self._compared = defaultdict(list)  # (program, seen) -> facts of each run that was compared

    def add(self, test, phase, outcome, told):
        """How a test's setup, call or end was; only a call passes a test."""
        for program, seen, compared in told:
            if phase == "call" or outcome != "passed":
                self._ends[program, seen][test] = outcome
            known = self._compared[program, seen]
            known += [facts for facts in compared if facts not in known]

    def rows(self):
        """What passed."""
        return [row for key in self._ends if (row := self._row(*key))]

    def _row(self, program, seen):
        ends, compared = self._ends[program, seen], self._compared[program, seen]
        passed = sorted(test for test, end in ends.items() if end == "passed")
        if not compared or not passed or "failed" in ends.values():
            return None
        on = ", ".join(sorted({facts["on"] for facts in compared}))
        converted = any(facts["converted"] for facts in compared)
        return {"program": program, "seen": seen, **compared[-1], "on": on, "converted": converted, "tests": passed}

    def unproven(self):
        """What is no row this time, and why."""
        for key, ends in self._ends.items():
            if not self._row(*key):
                yield titled(key, sorted({*ends.values()} - {"passed"}) or ["nothing was compared"])

    def wrong(self, committed, modules):
        """What rows of these modules say in the file, and this time did not."""
        found = {(row["program"], row["seen"]): row for row in self.rows()}
        for row in committed:
            key = row["program"], row["seen"]
            here = found.pop(key, None)
            asked = module(row) in modules and ("transcript" in row or not missing(row["versions"]))
            if asked and (lost := self._lost(row, here)):
                yield titled(key, lost)
        for key in found:
            yield titled(key, ["passed, and has no row"])

    def _lost(self, row, here):
        ends = self._ends[row["program"], row["seen"]]
        lost = [f"{test} {ends.get(test, 'did not run')}" for test in row["tests"] if ends.get(test) != "passed"]
        if here is None:
            return lost or ["nothing was compared"]
        facts = [name for name in row if name != "tests" and here.get(name) != row[name]]
        return lost + [f"{name} {here.get(name)!r}, not {row[name]!r}" for name in facts]


def titled(key, words):
    program, seen = key
    return f"{program} ({seen}): {'; '.join(words)}"


def module(row):
    """Where a row's tests are."""
    return row["tests"][0].partition("::")[0]


def read(path=FILE):
    return json.loads(path.read_text())


def write(rows, path):
    """In the order of the table."""
    rows = sorted(rows, key=lambda row: (row["program"].lower(), row["tests"]))
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def transcript(path, packages):
    """What was compared on a GPU, run by hand: the cases in its transcript, all of which are as they should be."""
    head, *lines, count = (ROOT / path).read_text().splitlines()
    cases = [line for line in lines if not line.startswith((" ", "#"))]
    if "  FAILED" in "\n".join(lines) or count != f"{len(cases)} of {len(cases)} cases as they should be":
        raise ValueError(f"{path} ends with {count!r}, and names {len(cases)} cases")
    gpus = int((re.match(r"# (\d+) x ", head) or ["#", "1", "x"])[1])
    found = dict(re.findall(r"([\w-]+) (\d[\w.]*)", head.replace("_", "-")))
    versions = {package: found[package] for package in packages}
    on = f"{gpus} GPUs" if gpus > 1 else "1 GPU"
    return {"versions": versions, "on": on, "converted": False, "transcript": path, "cases": cases}
