"""What the page says of a run that is not compared: each scalar that it has, and formats as they were."""

import numpy as np
import pytest

from narrowgauge.observe.report.pictures import format_of
from narrowgauge.observe.report.single import lines, single
from narrowgauge.observe.store import Table


class Recorded:
    """A run of which only this is asked."""

    status, metrics = "complete", ()

    def __init__(self, meta=None, **scalars):
        self.meta, self._scalars = (
            meta or {},
            Table({name: np.asarray(values, float) for name, values in scalars.items()}),
        )

    def scalars(self, *_names):
        return self._scalars


def test_a_row_for_each_scalar_that_a_run_has():
    one = Recorded(step=[1, 2, 3, 4], loss=[4, 3, 2, 1], eval_loss=[np.nan, 5, np.nan, np.nan], lr=[1e-3] * 4)
    other = Recorded(step=[1], loss=[7])
    told = single({"one": one, "other": other})
    assert [line.key for line in lines(told)] == [
        *("status", "steps", "loss", "eval_loss", "lr", "step_seconds", "peak_memory_bytes", "nan", "skipped")
    ]
    assert (told[0]["loss"], told[0]["eval_loss"], told[0]["lr"]) == ("1.0000", "5.0000", "0.001")
    assert (told[1]["loss"], told[1]["eval_loss"], told[1]["lr"]) == ("7.0000", "—", "—")


def test_what_ended_not_finite_is_said_to_have():
    nan = np.nan
    steps, lr = list(range(1, 9)), [1e-3] * 8
    gone = Recorded(step=steps, loss=[4, 3, 2, 2, 2, 2, 2, nan], grad_norm=[1, 1] + [nan] * 6, lr=lr,
                    nonfinite=[0, 0, 1, 1, 1, 1, 1, 1])  # fmt: skip
    back = Recorded(step=steps, loss=[4, 3, 2, 2, 2, 2, nan, 1], grad_norm=[1] * 8, lr=lr,
                    nonfinite=[0, 0, 0, 0, 0, 0, 1, 0])  # fmt: skip
    first, second = single({"gone": gone, "back": back})
    assert (first["loss"], first["grad_norm"], first["lr"], first["nan"]) == ("not finite", "not finite", "0.001", 6)
    assert (second["loss"], second["grad_norm"], second["nan"]) == ("1.0000", "1", 1)


@pytest.mark.parametrize(("meta", "steps"), [({}, "11"), ({"steps": 14}, "14"), ({"steps": 1200}, "1,200")])
def test_steps_that_were_left_alone_count(meta, steps):
    (told,) = single(
        {"one": Recorded(meta, step=[9, 10, 11, 12], loss=[4, 3, 2, np.nan], eval_loss=[np.nan] * 3 + [5])}
    )
    assert told["steps"] == steps


@pytest.mark.parametrize(("meta", "skipped"), [({}, 2), ({"skipped_steps": 5}, 5), ({"skipped_steps": 0}, 2)])
def test_steps_that_were_skipped_while_the_program_was_left_alone_count(meta, skipped):
    (told,) = single({"one": Recorded(meta, step=[1, 2, 3], loss=[4, 3, 2], skipped=[1, np.nan, 1])})
    assert told["skipped"] == skipped


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        (["samples"], "Samples"),
        (["samples", None], "Tokens or samples"),  # an older run does not say
        (["tokens and samples"], "Tokens or samples"),
        ([None], "Tokens"),
    ],
)
def test_what_is_counted_is_called_what_it_is(counted, said):
    scalars = {"step": [1], "tokens": [64], "tokens_per_second": [10]}
    runs = {str(i): Recorded({"counted": kind} if kind else {}, **scalars) for i, kind in enumerate(counted)}
    labels = {line.key: line.label for line in lines(single(runs))}
    assert (labels["tokens"], labels["tokens_per_second"]) == (f"{said} per step", f"{said} per second")


def test_the_tokens_of_a_step_are_told_to_the_last_one_and_those_of_a_second_are_not():
    told = single({"a": Recorded({}, step=[1, 2], tokens=[1024, 1024], tokens_per_second=[12_345, 12_345])})[0]
    assert (told["tokens"], told["tokens_per_second"]) == ("1,024", "12,300")


def test_an_evaluation_loss_that_is_a_sum_over_its_batches_says_so_beside_the_mean():
    meta = {"eval_sums": [2, 2]}
    (told,) = single({"one": Recorded(meta, step=[1, 2], loss=[0.5, 0.4], eval_loss=[np.nan, 120])})
    assert (told["loss"], told["eval_loss"]) == ("0.4000", "120 (a sum over a batch)")
    (told,) = single({"one": Recorded({"eval_sums": [1, 2]}, step=[1], loss=[0.4], eval_loss=[60])})
    assert told["eval_loss"] == "60.0000 (of sums over batches, in part)"


@pytest.mark.parametrize(
    ("meta", "gradients"),
    [
        ({"judged_by": "current"}, "E5M2"),
        ({"judged_by": "rowwise"}, "E4M3FN"),
        ({"recipe": "rowwise", "judged_by": "current"}, "E4M3FN"),
        ({"recipe": "fake-delayed"}, "E5M2"),
    ],
)
def test_gradients_have_the_format_of_what_judged_them(meta, gradients):
    assert format_of(Recorded(meta), "grad_output").name == gradients
    assert format_of(Recorded(meta), "input").name == "E4M3FN"
