"""Ours and the program's stances leave none behind, whichever ends first; a call that ran uncompiled is not refused."""

import pytest
import torch

from narrowgauge.session.doors.stance import Uncompiled, count_as_compiled, stance


@pytest.mark.parametrize("nested", [False, True])
def test_a_stance_of_the_programs_and_ours_leave_none_behind(nested):
    theirs, ours = torch.compiler.set_stance, Uncompiled()
    if nested:  # it lies in theirs, and ends behind it
        with theirs("eager_on_recompile"):
            ours.begin()
            assert stance() == "force_eager"
        assert stance() == "default"
        ours.end()
    else:  # theirs begins in ours, and ends behind it
        ours.begin()
        with theirs("eager_on_recompile"):
            ours.end()
            assert stance() == "eager_on_recompile"
        assert stance() == "force_eager"
        ours.look()  # as each call of something compiled does
    assert stance() == "default"
    ours.begin()
    assert stance() == "force_eager"
    ours.end()
    assert stance() == "default"


def test_one_of_ours_that_begins_before_the_last_has_ended_leaves_none_behind():
    ours = Uncompiled()
    ours.begin()
    ours.begin()  # two steps in one call of a compiled function
    assert stance() == "force_eager"
    ours.end()
    assert stance() == "default"


@pytest.mark.parametrize("over", [False, True])
def test_one_of_ours_that_is_paused_comes_back_unless_it_is_over(over):
    ours = Uncompiled()
    assert ours.pause()() is None  # there is none
    ours.begin()
    again = ours.pause()
    assert stance() == "default"
    if over:
        ours.end()
    again()
    assert stance() == ("default" if over else "force_eager")
    ours.end()
    assert stance() == "default"


def test_a_stance_that_the_program_takes_in_a_pause_stays():
    ours = Uncompiled()
    ours.begin()
    again = ours.pause()
    with torch.compiler.set_stance("eager_on_recompile"):
        again()
        assert stance() == "eager_on_recompile"
    ours.end()
    assert stance() == "default"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_call_that_begins_uncompiled_passes_when_it_is_to_be_compiled_as_it_returns(fullgraph):
    def function(x):
        count_as_compiled()
        ours.end()
        return x * 2

    ours = Uncompiled()
    compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
    ours.begin()
    try:
        assert compiled(torch.ones(1)) == 2
    finally:
        ours.end()


def test_the_next_call_is_refused_as_ever():
    count_as_compiled()
    counts = getattr(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if counts is None:
        pytest.skip("torch counts from 2.13 on")
    assert counts(-1) == -1  # it asks for nothing, as before
