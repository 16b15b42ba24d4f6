"""What a run did not find is told at its end."""

import json

import pytest

from narrowgauge.cli.outcome import converted, not_found, unrecorded, what_came_of_it


def test_what_was_not_found_is_told_as_the_run_says_it(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"not_found": ["No loss was found."]}}))
    assert not_found(tmp_path) == ["No loss was found."]


def test_that_no_step_was_recorded_is_told_as_the_run_says_it(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"unrecorded": "No tensor was recorded."}}))
    assert unrecorded(tmp_path) == ["No tensor was recorded."]
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"unrecorded": ""}}))
    assert unrecorded(tmp_path) == []


def test_without_facts_nothing_is_told(tmp_path):
    assert not_found(tmp_path) == []
    (tmp_path / "run.json").write_text('{"meta": {}}')
    assert not_found(tmp_path) == []
    (tmp_path / "run.json").write_text("{")
    assert not_found(tmp_path) == []


def test_a_folder_that_was_removed_meanwhile_is_told_as_such(tmp_path):
    gone = tmp_path / "gone"
    assert what_came_of_it(gone, 0) == f"{gone} was removed while the command ran, and what was recorded with it."


def test_a_program_that_is_left_in_the_background_may_record_later(tmp_path):
    told = what_came_of_it(tmp_path, 0)
    assert told.startswith(
        "nothing was watched: no Python process below this command made a torch.optim optimizer that could be watched "
        "before"
    )
    assert f"before the command ended. One that is still running may record into {tmp_path}. A program that" in told
    (tmp_path / "run.json").write_text('{"meta": {}}')
    assert what_came_of_it(tmp_path, 0).startswith(f"the run is in {tmp_path}")


def test_a_run_json_without_facts_is_passed_over(tmp_path):
    (tmp_path / "run.json").write_text('{"meta": null}')
    assert unrecorded(tmp_path) == []


def test_what_another_rank_found_is_not_told_as_missing(tmp_path):
    def rank(number, *missing):
        name = f"run.rank{number}.json" if number else "run.json"
        (tmp_path / name).write_text(json.dumps({"meta": {"not_found": missing}}))

    rank(0, "No model was found: none.", "No loss was found: backward was called on no scalar.")
    (tmp_path / "run.rank2.json").write_text('{"meta": {}}')  # it was killed
    rank(1, "No loss was found: backward was never called.", "No model was found: none.")
    assert len(not_found(tmp_path)) == 2
    rank(1, "No model was found: none.")  # the last stage of a pipeline has the loss
    assert not_found(tmp_path) == ["No model was found: none."]


def layer(name, recipe="rowwise", reason="O2: every linear not kept high"):
    return {"name": name, "recipe": recipe, "reason": reason}


HEAD = layer("lm_head", None, "output head: its name says so ('lm_head')")
ODD = [layer(f"odd.{n}", None, "K=20 is not a multiple of 16, which FP8 gemms need") for n in range(5)]


@pytest.mark.parametrize(
    ("rows", "emulated", "says"),
    [
        ([layer("up"), layer("down")], True, "2 of 2 linear layers in FP8 (rowwise, emulated)"),
        ([layer("up")], False, "1 of 1 linear layer in FP8 (rowwise)"),
        (
            [layer("up"), layer("down", "current"), HEAD],
            False,
            "2 of 3 linear layers in FP8 (rowwise and current), 1 kept high: lm_head: output head: its name says so "
            "('lm_head')",
        ),
        (
            [layer("up"), *ODD, HEAD],
            False,
            "1 of 7 linear layers in FP8 (rowwise), 6 kept high: odd.0, odd.1 and 3 more: K=20 is not a multiple of "
            "16, which FP8 gemms need; lm_head: output head: its name says so ('lm_head')",
        ),
        (
            [layer("up"), HEAD, layer("a", None, "skip='a'"), layer("b", None, "skip='b'"), layer("c", None, "why")],
            False,
            "1 of 5 linear layers in FP8 (rowwise), 4 kept high: lm_head: output head: its name says so ('lm_head'); "
            "a: skip='a'; b: skip='b'; and 1 more",
        ),
    ],
)
def test_what_was_converted_is_told_in_one_line(tmp_path, rows, emulated, says):
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"conversion": rows, "emulated": emulated}}))
    assert converted(tmp_path) == [says]


def test_layers_that_no_step_trained_did_not_run_in_fp8(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"meta": {"conversion": [layer("up"), HEAD], "steps": 0}}))
    [line] = converted(tmp_path)
    assert line.startswith("1 of 2 linear layers converted, and trained by no step (rowwise), 1 kept high: lm_head: ")


def test_layers_that_were_never_called_did_not_run_in_fp8(tmp_path):
    idle = [{**layer(name), "calls": 0} for name in "abc"]
    facts = {"conversion": [{**layer("up"), "calls": 40}, HEAD, *idle], "steps": 40}
    (tmp_path / "run.json").write_text(json.dumps({"meta": facts}))
    assert converted(tmp_path) == [
        "1 of 5 linear layers in FP8 (rowwise), 1 kept high: lm_head: output head: its name says so ('lm_head'); "
        "3 converted and never called (a, b and 1 more): what multiplies a weight without its layer, as F.linear does, "
        "is not in FP8"
    ]
    del facts["steps"]  # it was killed, and did not say how often its layers were called
    (tmp_path / "run.json").write_text(json.dumps({"meta": facts}))
    assert converted(tmp_path)[0].startswith("4 of 5 linear layers in FP8 (rowwise), 1 kept high")


def test_what_is_multiplied_beside_linear_layers_is_counted_and_named(tmp_path):
    facts = {
        "conversion": [layer("fc"), HEAD],
        "judged": ["conv1", "conv2", "attention.in_proj_weight", "lm_head"],
        "convolutions": ["conv1", "conv2"],
    }
    (tmp_path / "run.json").write_text(json.dumps({"meta": facts}))
    [linear, others] = converted(tmp_path)
    assert linear.startswith("1 of 2 linear layers in FP8 (rowwise), 1 kept high: lm_head: output head")
    assert others == (
        "in high precision, as only linear layers are converted: 2 convolutions (conv1, conv2) and 1 other product "
        "(attention.in_proj_weight)"
    )
    facts |= {"judged": ["conv1"], "convolutions": ["conv1"]}
    (tmp_path / "run.json").write_text(json.dumps({"meta": facts}))
    assert converted(tmp_path)[1] == "in high precision, as only linear layers are converted: 1 convolution (conv1)"
    facts |= {"judged": ["conv1", "out"], "recurrent": {"LSTM": [2, 0.9531]}}
    (tmp_path / "run.json").write_text(json.dumps({"meta": facts}))
    assert converted(tmp_path)[1] == (
        "in high precision, as only linear layers are converted: 1 convolution (conv1), 1 other product (out) and "
        "2 LSTM (95.3% of all parameters)"
    )
    facts |= {"judged": ["fc.lora_A", "out"], "linear_gone": ["fc.lora_A"], "recurrent": {}}
    (tmp_path / "run.json").write_text(json.dumps({"meta": facts}))
    assert converted(tmp_path)[1].endswith(": 1 other product (out)")


@pytest.mark.parametrize("attention", ["attention", ""])
def test_attention_s_packed_weight_is_told_once(tmp_path, attention):
    weight = f"{attention}.in_proj_weight".lstrip(".")
    rows = [layer("fc"), layer(attention, None, "multiplies its packed in_proj_weight itself")]
    facts = {"conversion": rows, "judged": [weight, "fc.in_proj_bias"]}
    (tmp_path / "run.json").write_text(json.dumps({"meta": facts}))
    linear, others = converted(tmp_path)
    assert linear.startswith("1 of 2 linear layers in FP8 (rowwise), 1 kept high: ")
    assert others.endswith("1 other product (fc.in_proj_bias)")


def test_layers_of_all_ranks_are_told_once(tmp_path):
    for name, rows in (("run.json", [layer("0"), HEAD]), ("run.rank1.json", [layer("0"), layer("1")])):
        (tmp_path / name).write_text(json.dumps({"meta": {"conversion": rows}}))
    [line] = converted(tmp_path)
    assert line.startswith("2 of 3 linear layers in FP8 (rowwise), 1 kept high: lm_head")


def test_layers_of_hand_made_stages_are_told_for_each_though_their_names_are_equal(tmp_path):
    first = [{**layer("0"), "part": "a"}, {**layer("2"), "part": "a"}]
    last = [{**layer("0"), "part": "b"}, {**layer("2", None, "skip='2'"), "part": "b"}]
    for name, rows in (("run.json", first), ("run.rank1.json", last)):
        (tmp_path / name).write_text(json.dumps({"meta": {"conversion": rows}}))
    assert converted(tmp_path) == ["3 of 4 linear layers in FP8 (rowwise), 1 kept high: 2 (rank 1): skip='2'"]


@pytest.mark.parametrize("meta", [{}, {"conversion": []}, {"conversion": [HEAD]}])
def test_where_nothing_was_converted_that_is_told_elsewhere(tmp_path, meta):
    (tmp_path / "run.json").write_text(json.dumps({"meta": meta}))
    assert converted(tmp_path) == []
