"""The rows of all ranks as one table: one for each layer, whoever has it."""

from narrowgauge.observe.verdict.converted import converted, label
from narrowgauge.observe.verdict.high import stays_high


def row(name, recipe="current", shape=(32, 32), **further):
    return {"name": name, "shape": list(shape), "recipe": recipe, "reason": "why", "calls": 2, **further}


def rank(*rows, **facts):
    return {"recipe": "current", "conversion": list(rows), **facts}


def called(ranks):
    return [label(row) for row in converted(ranks)]


def test_copies_and_shards_are_one_layer_with_the_most_calls_of_any():
    ranks = {0: rank(row("0"), row("1", None, calls=None)), 1: rank(row("0", calls=5), row("1", None, calls=None))}
    assert converted(ranks) == (row("0", calls=5), row("1", None, calls=None))


def test_a_layer_that_one_rank_has_under_a_name_of_its_own_is_called_by_it():
    assert called({0: rank(row("layers.0")), 1: rank(row("layers.1"))}) == ["layers.0", "layers.1"]


def test_parts_of_equal_names_are_told_apart_by_their_ranks():
    ranks = {number: rank(row("0", part="ab"[number % 2]), row("head", None)) for number in range(4)}
    assert called(ranks) == ["0 (ranks 0 and 2)", "head", "0 (ranks 1 and 3)"]


def test_so_are_layers_of_other_shapes_or_of_which_one_stayed_high():
    ranks = {0: rank(row("0"), row("1")), 1: rank(row("0", shape=(64, 32)), row("1", None))}
    assert called(ranks) == ["0 (rank 0)", "1 (rank 0)", "0 (rank 1)", "1 (rank 1)"]


def test_models_of_one_rank_that_came_after_each_other_are_all_told():
    assert called({0: rank(row("0"), row("0", shape=(64, 32)), row("0", None))}) == ["0"] * 3


def test_stages_that_share_a_name_carry_their_number_and_others_do_not():
    first, second = rank(row("0"), row("2"), stages={"0": 0, "2": 0}), rank(row("0"), stages={"0": 1})
    assert called({0: first, 1: second}) == ["stage0.0", "stage0.2", "stage1.0"]
    assert called({0: first, 1: rank(row("3"), stages={"3": 1})}) == ["0", "2", "3"]


def test_two_stages_of_one_rank_have_their_numbers_from_its_session():
    one = rank(row("0"), row("stage2.0"), stages={"0": 0, "stage2.0": 2})
    other = rank(row("0"), row("stage3.0"), stages={"0": 1, "stage3.0": 3})
    assert called({0: one, 1: other}) == ["stage0.0", "stage2.0", "stage1.0", "stage3.0"]


def test_what_a_rank_does_not_say_or_says_wrongly_is_left_out():
    assert converted({0: {}, 1: {"conversion": None}, 2: {"conversion": ["x"]}}) == ()
    assert called({0: rank({"name": "0"}), 1: {}}) == ["0"]


def test_a_stage_of_another_rank_that_stays_high_is_high_by_its_name_in_the_run():
    ranks = {0: rank(row("0"), judged=[], stages={"0": 0}), 1: rank(row("0", None), judged=["0"], stages={"0": 1})}
    high = stays_high(ranks)
    assert [high(site) for site in ("stage0.0:weight", "stage1.0:weight")] == [False, True]
    assert not stays_high({number: {**each, "recipe": None} for number, each in ranks.items()})("stage1.0:weight")


def test_a_rank_that_did_not_come_to_its_end_does_not_know_what_was_called():
    """What it wrote of its layers is from before they were."""
    row = {"name": "a", "recipe": "current", "calls": 0}
    assert converted({0: {"conversion": [row], "steps": 9}})[0]["calls"] == 0
    assert converted({0: {"conversion": [row]}})[0]["calls"] is None
    assert converted({0: {"conversion": [row]}, 1: {"conversion": [{**row, "calls": 3}], "steps": 9}})[0]["calls"] == 3
