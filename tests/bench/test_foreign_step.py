"""The benchmark of layers that are not ours stands in for a session: what doors tell it, it takes."""

import inspect
from contextlib import closing

import pytest
from benchmarks.bench_foreign_step import Program

from narrowgauge.session.doors.compilations import HearsCompiled

TOLD = [name for name, what in vars(HearsCompiled).items() if inspect.isfunction(what) and not name.startswith("_")]


@pytest.mark.parametrize("name", TOLD)
def test_it_takes_what_is_told_of_compiled_calls(name):
    asked = list(inspect.signature(getattr(HearsCompiled, name)).parameters.values())[1:]
    given = [None for each in asked if each.kind is not each.KEYWORD_ONLY]
    named = {each.name: None for each in asked if each.kind is each.KEYWORD_ONLY}
    with closing(Program("plain-graphs")) as program:
        inspect.signature(getattr(program, name)).bind(*given, **named)
