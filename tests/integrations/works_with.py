"""What a test module proves: a line of the README's table "works with".

A module declares `WORKS` beside its tests: what is launched, and a few words of what that does. The table is not made
from these but from what passed:

    compared    of each run whose rows a test read: how many ranks left a part of it, and whether layers were in FP8
    outcome     its tests that passed, with what they compared and the versions that are installed (outcomes.py)
    works_with.json    the outcomes of `make table`, from which docs/generate.py makes the table; `make test` fails
                where its own are others

The versions are those that constraints.txt pins, and a test is skipped where another is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class WorksWith:
    """One program that is watched unedited.

    Args:
        name: what its users call it.
        packages: the distributions that it takes, the first being its own.
        seen: what the test does with it, in a few words; what is `code` there stands in what is launched.
        ranks: how many processes train.
        converted: whether the test also has its layers converted to FP8.
        compared: what its tests have compared so far.
    """

    name: str
    packages: tuple[str, ...]
    seen: str
    ranks: int = 1
    converted: bool = False
    compared: list[dict] = field(default_factory=list, compare=False)

    def missing(self) -> str:
        """Why it cannot be tested here; "" if it can."""
        return missing(self.packages)

    def compares(self, run) -> None:
        """A test reads the rows of this run."""
        ranks = run.metas.values()
        converted = any(row["recipe"] for meta in ranks for row in meta.get("conversion") or ())
        on = f"{len(ranks)} ranks" if len(ranks) > 1 else "1 process"
        versions = {package: installed(package) for package in self.packages}
        self.compared.append({"versions": versions, "on": on, "converted": converted})

    def unsaid(self, launched: str) -> list[str]:
        """What it names as code and is not in what is launched: command, environment, program."""
        return [code for code in re.findall(r"`([^`]+)`", self.seen) if code not in launched]


def pinned(packages: Iterable[str]) -> dict[str, str]:
    """The versions that they are tested with."""
    found = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    return {package: found[package] for package in packages}


def installed(package: str) -> str | None:
    """The version that is here, for whatever device it was built."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def missing(packages: Iterable[str]) -> str:
    """Why what takes them cannot be tested here; "" if it can."""
    for package, wanted in pinned(packages).items():
        here = installed(package)
        if here is None:
            return f"{package} is not installed: pip install -c constraints.txt '.[integrations]'"
        if here != wanted and not os.environ.get("TEST_DEVICE"):  # elsewhere with what is installed there
            return f"{package} is {here}, and constraints.txt says {wanted}"
    return ""
