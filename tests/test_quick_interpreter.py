"""That the shortcuts in triton's interpreter are in place: without them its tests pass as well, in twice the time."""

import os

import pytest
from tests import quick_interpreter

interpreter = pytest.importorskip("triton.runtime.interpreter")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here, not interpreted")
def test_the_interpreter_of_this_triton_is_one_that_we_know():
    assert interpreter._patch_lang.__module__ == quick_interpreter.__name__


def test_another_interpreter_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(interpreter, "_patch_builtin")
    before = dict(vars(interpreter))
    assert not quick_interpreter.install()
    assert vars(interpreter) == before
