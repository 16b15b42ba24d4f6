"""What to keep high next is something that this very model takes."""

import pytest
from tests.observe.verdict.fakes import evidence
from torch import nn

from narrowgauge import convert
from narrowgauge.observe.verdict import judge
from narrowgauge.observe.verdict.keeping import keep_high


class Of(nn.Module):
    """Just these parts; no list of modules itself."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def blocks(number):
    """A model of so many equal blocks, a layer in front and a head."""
    stack = nn.ModuleList(Of(up=nn.Linear(16, 32), down=nn.Linear(32, 16)) for _ in range(number))
    return Of(stem=nn.Linear(16, 16), blocks=stack, head=nn.Linear(16, 16))


def plain(number):
    """So many layers without a list of blocks; the last one is a head, and stays high."""
    return Of(**{f"fc{n}": nn.Linear(16, 16) for n in range(1, number)}, head=nn.Linear(16, 32))


def advised(model, recipe="current", **settings):
    return keep_high(convert(model, recipe, **settings)[1].to_dict()["rows"], recipe)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (lambda: blocks(6), {}, "Keep the last 2 blocks in high precision: last = 2 under [convert]"),
        (lambda: blocks(6), {"first": 1, "last": 2}, "Keep the last 4 blocks in high precision: last = 4 under"),
        (lambda: blocks(6), {"first": 2, "last": 2}, "Keep the last 3 blocks in high precision: last = 3 under"),
        (lambda: blocks(2), {}, "Keep the last block in high precision: last = 1 under [convert]"),
        (lambda: blocks(2), {"last": 1}, 'Keep blocks.0.down in high precision: skip = ["blocks.0.down"] under'),
        (lambda: blocks(2), {"only": "stem"}, "Try a finer scaling: rowwise or blockwise."),
        (lambda: plain(3), {}, 'Keep fc2 in high precision: skip = ["fc2"] under [convert]'),
        (lambda: plain(5), {}, 'Keep fc3 and fc4 in high precision: skip = ["fc3", "fc4"] under [convert]'),
        (lambda: plain(4), {"skip": ["fc3"]}, 'Keep fc2 in high precision, too: add "fc2" to skip under [convert]'),
        (lambda: plain(2), {}, "Try a finer scaling: rowwise or blockwise."),
    ],
)
def test_what_is_advised(model, settings, says):
    assert advised(model(), **settings).startswith(says)


@pytest.mark.parametrize("model", [lambda: blocks(6), lambda: blocks(3), lambda: blocks(2), lambda: plain(4)])
def test_the_model_takes_what_is_advised_again_and_again_until_one_layer_is_left(model):
    last, skip = 0, []
    for _ in range(9):
        rows = convert(model(), "current", last=last, skip=skip)[1].to_dict()["rows"]
        advice = keep_high(rows, "current")
        if "last = " in advice:
            last = int(advice.partition("last = ")[2].split()[0])
        else:
            skip += [row["name"] for row in rows if f'"{row["name"]}"' in advice]
        if "finer" in advice:
            break
    assert sum(row["recipe"] is not None for row in rows) == 1


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("delayed", "Try a finer scaling: current."),
        ("fake-rowwise", "Try a finer scaling: blockwise."),
        ("blockwise", "Leave this recipe out: it has the finest scales, and no layer of few is left to keep high."),
    ],
)
def test_where_one_layer_is_left_the_scaling_is_next(recipe, says):
    assert keep_high([{"name": "up", "recipe": recipe}], recipe) == says


def test_the_file_of_settings_has_any_name_and_is_read_where_it_is_given():
    advice = advised(blocks(6))
    assert advice.endswith("last = 2 under [convert] in the settings file given with --config.")


@pytest.mark.parametrize(
    ("recipe", "failed", "says"),
    [
        ("delayed", {"delayed", "current"}, "Try a finer scaling: rowwise or blockwise."),
        ("delayed", {"delayed", "current", "rowwise"}, "Try a finer scaling: blockwise."),
        ("current", {"current", "rowwise", "blockwise"}, "Leave this recipe out: finer scales failed, too, and no"),
    ],
)
def test_a_recipe_that_failed_itself_is_not_advised(recipe, failed, says):
    assert keep_high([{"name": "up", "recipe": recipe}], recipe, failed=failed).startswith(says)


def test_a_verdict_advises_nothing_that_failed_in_it():
    runs = {
        name: evidence(name, [2.1] * 40, meta={"recipe": name, "conversion": [{"name": "up", "recipe": name}]})
        for name in ("delayed", "current")
    }
    advised = [v.next_step for v in judge(evidence("baseline", [2.0] * 40), None, runs, {}).variants]
    assert advised == ["Try a finer scaling: rowwise or blockwise."] * 2


def test_of_several_models_no_name_is_advised_since_each_would_have_to_have_it():
    rows = convert(plain(5), "current")[1].to_dict()["rows"]
    assert keep_high(rows, "current", models=2) == "Try a finer scaling: rowwise or blockwise."


def test_a_run_by_an_older_version_says_nothing_of_blocks():
    rows = [{"name": "blocks.0.up", "recipe": "current"}, {"name": "blocks.1.up", "recipe": "current"}]
    assert 'skip = ["blocks.1.up"]' in keep_high(rows, "current")


def test_a_verdict_gives_this_advice():
    rows = convert(plain(3), "current")[1].to_dict()["rows"]
    run = evidence("current", [2.1] * 40, meta={"conversion": rows})
    [variant] = judge(evidence("baseline", [2.0] * 40), None, {"current": run}, {}).variants
    assert (variant.outcome, variant.next_step.partition(":")[0]) == ("fail", "Keep fc2 in high precision")
