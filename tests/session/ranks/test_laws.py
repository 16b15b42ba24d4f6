"""Scalars of several ranks as one."""

import math

import pytest

from narrowgauge.session.ranks.laws import disagreeing, merged
from narrowgauge.session.ranks.layout import Layout, families

NAN = float("nan")


def test_each_scalar_has_its_law():
    first = {"loss": 1.0, "step_seconds": 2.0, "microbatches": 2, "clean": 1.0, "lr": 0.1, "data_digest": 7.0}
    second = {"loss": 2.0, "step_seconds": 4.0, "microbatches": 2, "clean": 0.0, "lr": 0.1, "data_digest": 9.0}
    first |= {"tokens": 8.0, "tokens_per_second": 4.0}
    second |= {"tokens": 8.0, "tokens_per_second": 2.0, "skipped": 1.0}
    want = {"loss": 1.5, "step_seconds": 4.0, "microbatches": 2, "clean": 0.0, "lr": 0.1, "data_digest": 7.0}
    want |= {"tokens": 16.0, "tokens_per_second": 4.0, "skipped": 1.0}
    assert merged([first, second], ["", ""]) == want


BRIEF = {"loss": 1.0, "lr": 0.1, "lr_1": 0.2, "step_seconds": 2.0, "clean": 1.0, "nonfinite": 0.0}
WHOLE = {**BRIEF, "loss": 2.0, "clean": 0.0, "step_seconds": 3.0, "microbatches": 1.0, "tokens": 8.0, "grad_norm": 1.0}
WHOLE |= {"param_square_local": 4.0, "data_seconds": 0.1, "data_digest": 3.0, "memory_bytes": 9.0, "eval_loss": 5.0}


@pytest.mark.parametrize("whole_first", [True, False])
def test_of_a_step_that_is_brief_on_any_rank_there_is_what_is_known_of_all(whole_first):
    rows = [WHOLE, BRIEF] if whole_first else [BRIEF, WHOLE]
    want = {**BRIEF, "loss": 1.5, "step_seconds": 3.0, "clean": 0.0, "eval_loss": 5.0}
    assert merged(rows, "aa") == want
    assert merged([BRIEF, BRIEF], "aa") == BRIEF
    scaled = [{**row, "loss_scale": 8.0, "skipped": 1.0} for row in rows]
    assert merged(scaled, "aa") == want | {"loss_scale": 8.0, "skipped": 1.0}
    stage = {name: value for name, value in WHOLE.items() if name != "loss"}  # whose last one alone has a loss
    assert merged([stage, BRIEF], "ab")["loss"] == 1.0


@pytest.mark.parametrize("other", [BRIEF, WHOLE])
@pytest.mark.parametrize("nonfinite", [0.0, 1.0])
def test_a_loss_that_is_not_known_on_one_rank_is_not_known(other, nonfinite):
    unknown = {name: value for name, value in BRIEF.items() if name not in ("loss", "nonfinite")}
    found = merged([unknown, {**other, "nonfinite": nonfinite}], "aa")
    assert "loss" not in found
    assert found.get("nonfinite") == (1.0 if nonfinite else None)


@pytest.mark.parametrize("name", ["turn", "lr", "lr_1", "loss_scale", "data_digest"])
def test_what_names_a_step_or_was_set_is_the_first_rank_s(name):
    """A mean would be of none of them: there is no turn 0.5."""
    assert merged([{"loss": 1.0}, {name: 1.0}, {name: 0.0}], "aaa")[name] == 1.0


def test_a_nan_on_one_rank_is_one_of_all():
    assert math.isnan(merged([{"loss": 1.0}, {"loss": NAN}], ["", ""])["loss"])


@pytest.mark.parametrize(
    ("norms", "kinds", "norm"),
    [
        ((3.0, 3.0), "aa", 3.0),  # gradients that were all-reduced
        ((3.0, 4.0), "aa", 5.0),  # parts that nobody declared
        ((3.0, 4.0), "ab", 5.0),  # stages
        ((3.0, 3.0, 4.0, 4.0), "aabb", 5.0),  # stages, each of which two ranks train
        ((3.0, 3.0, 3.0, 3.0), "aabb", 3.0),  # a norm that the program took over all of them
        ((3.0, 4.0, 3.0, 4.0), "aaaa", 5.0),  # parts of each of two copies
        ((3.0, 3.0, 4.0), "aaa", 34**0.5),  # parts, two of them alike by chance
    ],
)
def test_norms_of_copies_count_once_and_those_of_parts_add_up(norms, kinds, norm):
    assert merged([{"grad_norm": n} for n in norms], kinds)["grad_norm"] == norm


@pytest.mark.parametrize(
    ("norms", "began", "losses", "norm"),
    [
        ((3.0, 3.0), "aa", (1, 1), 3.0),  # gradients that were all-reduced
        ((3.0, 5.0), "aa", (1, 1), 17**0.5),  # each rank its own: local SGD
        ((3.0, NAN), "aa", (1, 1), NAN),
        ((3.0, 4.0), "ab", (1, 1), 5.0),  # parts
        ((3.0, 4.0), "aa", (0, 1), 5.0),  # stages, from one seed
        ((3.0, 5.0, 4.0, 4.0), "aabb", (1, 1, 1, 1), 33**0.5),  # two shards, each of which two ranks have
        ((3.0, 4.0), ("", ""), (1, 1), 5.0),  # nobody knows
    ],
)
def test_norms_of_replicas_that_went_their_own_ways_are_those_of_one(norms, began, losses, norm):
    rows = [{"param_norm": n, "update_ratio": 0.1} | {"loss": 1.0} for n in norms]
    for row in (row for row, has in zip(rows, losses, strict=True) if not has):
        del row["loss"]
    found = merged(rows, "a" * len(norms), began=list(began))
    assert found["param_norm"] == pytest.approx(norm, nan_ok=True)
    assert found["update_ratio"] == 0.1


@pytest.mark.parametrize(
    ("norms", "ratios", "kinds", "ratio"),
    [
        ((3.0, 3.0), (0.1, 0.1), "aa", 0.1),
        ((3.0, 4.0), (0.1, 0.2), "ab", 0.73**0.5 / 5),  # stages: 0.3 and 0.8 of 3 and 4
        ((3.0, 3.0, 4.0), (0.1, 0.1, 0.2), "aab", 0.73**0.5 / 5),  # two ranks train one of them
        ((3.0, 4.0), (0.1, 0.2), "aa", 0.73**0.5 / 5),  # parts that nobody declared
        ((3.0, 3.0), (0.1, 0.7), "aa", 0.5),  # copies that each rank moves by itself
        ((3.0, NAN), (0.1, NAN), "ab", NAN),
        ((0.0, 0.0), (math.inf, math.inf), "ab", math.inf),  # zeros, which moved
        ((0.0, 0.0), (math.inf, NAN), "ab", NAN),
        ((3.0, 0.0), (0.1, math.inf), "ab", NAN),  # how far zeros moved, nothing tells
    ],
)
def test_a_ratio_of_norms_is_that_of_the_whole(norms, ratios, kinds, ratio):
    rows = [{"param_norm": norm, "update_ratio": moved} for norm, moved in zip(norms, ratios, strict=True)]
    assert merged(rows, kinds)["update_ratio"] == pytest.approx(ratio, rel=1e-12, nan_ok=True)
    assert merged([*rows, {"loss": 1.0}], f"{kinds}c")["update_ratio"] == pytest.approx(ratio, rel=1e-12, nan_ok=True)


def test_squares_of_shards_add_up_to_norms():
    rows = [{"grad_square_local": 9.0, "param_square_local": 64.0, "update_square_local": 3.0}] * 2
    rows[1] = {"grad_square_local": 16.0, "param_square_local": 36.0, "update_square_local": 1.0}
    assert merged(rows, "aa") == {"grad_norm": 5.0, "param_norm": 10.0, "update_norm": 2.0, "update_ratio": 0.2}


@pytest.mark.parametrize(
    ("squares", "kinds", "meshes", "norm"),
    [
        ((9.0, 16.0, 9.0, 16.0), "aaaa", (0, 0, 2, 2), 5.0),  # the whole on each of two meshes
        ((9.0, 16.0, 9.0, 16.0), "aabb", (0, 0, 2, 2), 50**0.5),  # two stages
        ((9.0, 9.0, 16.0, 16.0), "aaaa", (0, 0, 2, 2), 50**0.5),  # stages whose layers have the same names
        ((4.5, 8.0, 4.5, 8.0), "aaaa", (0, 0, 0, 0), 5.0),  # one mesh, where each says its share
        ((9.0, 16.0), "aa", (None, None), 5.0),
    ],
)
def test_squares_of_several_meshes_are_parts_or_copies(squares, kinds, meshes, norm):
    assert merged([{"grad_square_local": square} for square in squares], kinds, meshes)["grad_norm"] == norm


def test_the_same_data_counts_once_and_stages_pass_on_what_the_first_counted():
    tensor_parallel = [{"tokens": 8.0, "data_digest": 1.0}, {"tokens": 8.0, "data_digest": 1.0}]
    assert merged(tensor_parallel, "aa")["tokens"] == 8.0
    stages = [{"tokens": 8.0, "data_digest": 1.0}, {"tokens": 2.0, "data_digest": 5.0}]
    assert merged(stages, "ab")["tokens"] == 8.0


def test_ranks_with_experts_of_their_own_have_their_own_data():
    """They share what is no expert; what shares nothing is fed by the others."""
    layouts = [Layout(operands=("gate:input", f"experts.{rank}:input")) for rank in range(3)]
    layouts += [Layout(operands=("head:input", "gate:input"), stages=(1, 1))]
    kinds, of = [one.sites for one in layouts], families(layouts)
    assert of[0] == of[1] == of[2] != of[3]
    assert families(layouts[2:]) == kinds[2:]
    joined = [layouts[0], Layout(operands=("head:input",)), Layout(operands=("experts.0:input", "head:input"))]
    assert len(set(families(joined))) == 1
    rows = [{"tokens": 8.0, "data_digest": digest} for digest in (1.0, 2.0, 2.0, 3.0)]
    assert merged(rows, kinds, families=of)["tokens"] == 16.0
    del rows[1]["data_digest"], rows[2]["data_digest"]  # they were given what the first made
    assert merged(rows, kinds, families=of)["tokens"] == 8.0


def test_what_is_set_should_be_the_same_on_ranks_of_one_kind():
    rows = [{"lr": 0.1, "loss_scale": 4.0}, {"lr": 0.2, "loss_scale": 4.0}]
    assert disagreeing(rows, "aa") == {"lr": {0: 0.1, 1: 0.2}}
    assert disagreeing(rows, "ab") == {}
    rows = [{"lr": 0.1, "lr_0": 0.1, "lr_1": 0.01}, {"lr": 0.1, "lr_0": 0.1, "lr_1": 0.02}]
    assert disagreeing(rows, "aa") == {"lr_1": {0: 0.01, 1: 0.02}}
