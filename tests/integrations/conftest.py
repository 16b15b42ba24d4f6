"""Keeps what tests prove; a run fails in which a row of the README's table was not proven again, or it writes them."""

from pathlib import Path

import pytest
from tests.integrations.outcomes import FILE, Outcomes, module, read, write
from tests.integrations.watched import DEVICE

TOLD, HERE, FOUND = "works with", Path(__file__).parent, Outcomes()
CHOSEN = ("keyword", "markexpr", "lf", "deselect", "collectonly")  # of a file not all tests run then
SAID = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, default=FILE, help="the rows of the README's table")
    parser.addoption("--write-outcomes", action="store_true", help="write those of the modules that run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """What a test's rows rest on goes with its report, to another process if need be."""
    report, declared = (yield), getattr(item.module, "WORKS", ())
    declared = declared if isinstance(declared, tuple) else (declared,)
    used = [value.works for value in item.funcargs.values() if getattr(value, "works", None) in declared]
    told = [(works.name, works.seen, list(works.compared)) for works in used or declared]
    report.user_properties.append((TOLD, told))
    return report


def pytest_runtest_logreport(report):
    for told in (told for name, told in report.user_properties if name == TOLD):
        FOUND.add(report.nodeid.removeprefix("tests/integrations/"), report.when, report.outcome, told)


def pytest_sessionfinish(session):
    config = session.config
    modules = whole(config)
    if hasattr(config, "workerinput") or DEVICE != "cpu" or not modules:
        return
    path, writes = config.getoption("--outcomes", FILE), config.getoption("--write-outcomes", False)
    committed = read(path)
    said = list(FOUND.unproven() if writes else FOUND.wrong(committed, modules))
    if said:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        said.append(f"{path.name} is left as it was" if writes else "`make table` writes what passes")
    elif writes:
        write([row for row in committed if module(row) not in modules] + FOUND.rows(), path)
        said.append(f"{path} written")
    config.stash[SAID] = said


def pytest_terminal_summary(terminalreporter, config):
    if said := config.stash.get(SAID, []):
        terminalreporter.section("the README's table")
        for line in said:
            terminalreporter.line(line)


def whole(config):
    """The modules of which all tests were asked for."""
    if any(config.getoption(name, None) for name in CHOSEN):
        return set()
    asked = [Path(config.invocation_params.dir, arg).resolve() for arg in config.args]
    return {file.name for file in HERE.glob("test_*.py") if any(file.is_relative_to(path) for path in asked)}
