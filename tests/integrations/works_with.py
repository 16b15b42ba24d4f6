"""What a test module proves: a line of the README's table "works with".

A module declares `WORKS` beside its tests. The versions are those that constraints.txt pins, and a test is skipped
where another is installed; so what the table says is what passed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class WorksWith:
    """One program that is watched unedited.

    Args:
        name: what its users call it.
        packages: the distributions that it takes, the first being its own.
        seen: what the test does with it, in a few words.
        ranks: how many processes train.
        converted: whether the test also has its layers converted to FP8.
        where: on what, if not on CPUs.
    """

    name: str
    packages: tuple[str, ...]
    seen: str
    ranks: int = 1
    converted: bool = False
    where: str = ""

    @property
    def pinned(self) -> dict[str, str]:
        """The versions that it was tested with."""
        text = (ROOT / "constraints.txt").read_text()
        found = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
        return {package: found[package] for package in self.packages}

    def missing(self) -> str:
        """Why it cannot be tested here; "" if it can."""
        for package, wanted in self.pinned.items():
            try:
                here = version(package).partition("+")[0]
            except PackageNotFoundError:
                return f"{package} is not installed: pip install -c constraints.txt '.[integrations]'"
            if here != wanted and not os.environ.get("TEST_DEVICE"):  # elsewhere with what is installed there
                return f"{package} is {here}, and constraints.txt says {wanted}"
        return ""

    def row(self) -> str:
        """A row of the table."""
        own = self.packages[0]
        processes = self.where or (f"{self.ranks} ranks" if self.ranks > 1 else "1 process")
        done = "watched, converted" if self.converted else "watched"
        return f"| {self.name} | {own} {self.pinned[own]} | {self.seen} | {processes} | {done} |"
