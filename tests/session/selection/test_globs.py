"""Globs on sites: what they select, and which of them selected nothing."""

import pytest

from narrowgauge.metrics.site import OPERAND_ROLES
from narrowgauge.session.selection.globs import SiteGlobs


@pytest.mark.parametrize(
    ("globs", "selected"),
    [
        ({}, "a.0:input a.0:output b:input b:output"),
        ({"sites": ["a"]}, "a.0:input a.0:output"),
        ({"sites": ["*.0:input"]}, "a.0:input"),
        ({"sites": ["*:input", "b:output"]}, "a.0:input b:input b:output"),
        ({"sites": ["!a"]}, "b:input b:output"),
        ({"sites": ["a", "!*:output"]}, "a.0:input"),
        ({"skip": ["a.0:input", "b"]}, "a.0:output"),
        ({"roles": ["output"]}, "a.0:output b:output"),
        ({"sites": ["b"], "roles": ["output"]}, "b:output"),
        ({"sites": ["c"]}, ""),
        ({"sites": ["[bc]:[io]*"]}, "b:input b:output"),
    ],
)
def test_globs_select(globs, selected):
    chosen = SiteGlobs("watch.sites", **globs)
    found = [f"{m}:{r}" for m in ("a.0", "b") for r in ("input", "output") if chosen.selects(m, r)]
    assert found == selected.split()
    modules = {site.partition(":")[0] for site in selected.split()}
    assert {m for m in ("a.0", "b") if chosen.reaches(m)} == modules


def test_a_name_with_brackets_is_that_name():
    """`[0]` is a choice of characters in a glob, so that a `ModuleDict`'s `heads[0]`, written out, matched nothing."""
    globs = SiteGlobs("watch.sites", ["m.heads[0]", "!m.heads[0].norm", "m.x[1]:input"])
    sites = [("m.heads[0]", "input"), ("m.heads[0].norm", "input"), ("m.heads[1]", "input")]
    sites += [("m.x[1]", role) for role in ("input", "weight")]
    assert [globs.selects(*site) for site in sites] == [True, False, False, True, False]
    assert globs.unmatched() == []


def test_globs_that_matched_nothing_are_told_with_what_is_near():
    globs = SiteGlobs("watch.sites", ["blocks.0.fc1", "blocks.*.fc3", "blocks.0.fc1:output", "!heda"], skip=["xyz"])
    assert globs.unmatched() == []  # nobody asked
    for name in ("blocks.0.fc1", "blocks.0.fc2", "head"):
        globs.reaches(name)
    globs.selects("blocks.0.fc1", "input")
    assert globs.unmatched() == [
        "watch.sites: 'blocks.*.fc3' matched nothing in this program; did you mean 'blocks.0.fc2'?",
        "watch.sites: 'blocks.0.fc1:output' matched nothing in this program; there are: 'blocks.0.fc1', "
        "'blocks.0.fc2', 'head'.",
        "watch.sites: '!heda' matched nothing in this program; did you mean 'head'?",
        "watch.skip: 'xyz' matched nothing in this program; there are: 'blocks.0.fc1', 'blocks.0.fc2', 'head'.",
    ]


def test_a_glob_whose_module_is_there_is_told_of_its_role():
    """It named the block's first layer as what was meant."""
    dumped = SiteGlobs("dump[0].sites", ["blocks.0:output", "blocks.0.fc1"], roles=OPERAND_ROLES)
    watched = SiteGlobs("watch.sites", ["blocks.0:output"])
    for globs in (dumped, watched):
        for name in ("blocks.0.fc1", "blocks.0.fc2"):
            globs.reaches(name)
            globs.selects(name, "input")
    assert dumped.unmatched() == [
        "dump[0].sites: 'blocks.0:output' matched nothing in this program; dump[0] has no other roles than input, "
        "weight, grad_output."
    ]
    assert watched.unmatched() == [
        "watch.sites: 'blocks.0:output' matched nothing in this program; there are: 'blocks.0.fc1', 'blocks.0.fc2'."
    ]


@pytest.mark.parametrize(
    ("globs", "more"),
    [
        ({"sites": ["a", "!a"]}, ""),
        ({"skip": ["*"]}, ""),
        ({"sites": ["a:input"], "roles": ["weight"]}, ""),
        ({"roles": ["output"]}, " Only converted layers have results."),
    ],
)
def test_a_choice_whose_parts_leave_nothing_is_told(globs, more):
    chosen = SiteGlobs("watch.sites", **globs)
    assert chosen.unmatched() == []  # nobody asked
    for name in ("a", "b"):
        chosen.reaches(name)
        for role in ("input", "weight", "grad_output"):
            chosen.selects(name, role)
    told = "watch: its sites and roles together matched nothing in this program; there are: 'a', 'b'."
    assert chosen.unmatched() == [told + more]


def test_what_was_not_chosen_at_all_is_not_told():
    globs = SiteGlobs("watch.sites")
    globs.reaches("a")
    assert globs.unmatched() == []


def test_a_role_that_never_came_is_told_beside_others_that_did():
    globs = SiteGlobs("watch.sites", ["a"], roles=["input", "grad_output", "output"])
    assert globs.unmatched() == []  # nobody asked
    for site in (("a", "input"), ("b", "grad_output"), ("a", "weight")):
        globs.selects(*site)
    assert globs.unmatched() == [
        "watch.roles: 'grad_output' matched nothing in this program.",
        "watch.roles: 'output' matched nothing in this program; only converted layers have results.",
    ]
    globs.selects("a", "output")
    assert globs.unmatched() == ["watch.roles: 'grad_output' matched nothing in this program."]


@pytest.mark.parametrize("roles", [[], ["input", "weight", "grad_output"]])
def test_roles_that_nobody_chose_are_not_told(roles):
    globs = SiteGlobs("dump[0].sites", ["a"], roles=roles)
    globs.selects("a", "input")
    assert globs.unmatched() == []
