"""Rules of the house that a machine can check: sizes, names, asserts, pickles, docstrings."""

import ast
import statistics
from pathlib import Path

import pytest

import narrowgauge

ROOT = Path(narrowgauge.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_CALLS = {"torch.save", "pickle.dump", "pickle.dumps", "pickle.load", "pickle.loads"}


def tree(path):
    return ast.parse(path.read_text())


def lines(path):
    return path.read_text().count("\n")


def short(path):
    return str(path.relative_to(ROOT))


def narrows(test):
    """Whether an assert only tells the type checker what holds: `x is not None`, joined by `and`."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(narrows(part) for part in test.values)
    return isinstance(test, ast.Compare) and ast.unparse(test).endswith(" is not None")


def asserts(module):
    found = [node for node in ast.walk(module) if isinstance(node, ast.Assert)]
    return [node.lineno for node in found if node.msg is not None or not narrows(node.test)]


def pickles(module):
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in {"pickle", "cloudpickle", "dill"}]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "") in {"pickle", "cloudpickle", "dill"} else []
        elif isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            found += [call] if call in FORBIDDEN_CALLS else []
            found += [
                "weights_only=False"
                for word in node.keywords
                if word.arg == "weights_only" and getattr(word.value, "value", None) is not True
            ]
    return found


def test_files_are_short():
    sizes = {short(path): lines(path) for path in FILES if lines(path)}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
    assert statistics.median(sizes.values()) < 150


def test_no_file_is_called_utils():
    assert [short(p) for p in FILES if p.stem.strip("_") in {"util", "utils", "helpers", "misc", "common"}] == []


def test_no_assert_stands_for_an_error():
    assert {short(p): found for p in FILES if (found := asserts(tree(p)))} == {}


def test_no_pickle_is_written_or_read():
    assert {short(p): found for p in FILES if (found := pickles(tree(p)))} == {}


def test_every_module_opens_with_prose():
    assert [short(p) for p in FILES if lines(p) and not ast.get_docstring(tree(p))] == []


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (asserts, "def f(x):\n    assert x > 0"),
        (asserts, "def f(x):\n    assert x is not None, 'give an x'"),
        (pickles, "import pickle"),
        (pickles, "from pickle import dumps"),
        (pickles, "torch.save(x, path)"),
        (pickles, "torch.load(path, weights_only=False)"),
    ],
)
def test_the_checks_see_what_they_look_for(check, code):
    assert check(ast.parse(code))


def test_an_assert_may_narrow_a_type():
    assert asserts(ast.parse("assert state.table is not None and row is not None")) == []
