"""Synthetic runs, written once per test session; this folder is importable, so tests can `import synthetic`."""

from __future__ import annotations

from pathlib import Path

import pytest
import synthetic

from narrowgauge.observe.report import html
from narrowgauge.observe.store import Run, open_run


@pytest.fixture(scope="session")
def synthetic_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return synthetic.write_all(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="session")
def synthetic_runs(synthetic_paths: dict[str, Path]) -> dict[str, Run]:
    return {name: open_run(path) for name, path in synthetic_paths.items()}


@pytest.fixture(scope="session")
def report_file(synthetic_runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    assert html(synthetic.verdict(), synthetic_runs, out) == out
    return out
