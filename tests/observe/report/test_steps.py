"""An evaluation before the first step is no step; a step whose loss is NaN is one."""

import math
import re

import pytest

from narrowgauge.cli.main import main
from narrowgauge.observe.report import html
from narrowgauge.observe.report import text as text_of
from narrowgauge.observe.store import RunWriter, open_run


@pytest.fixture
def evaluated(tmp_path):
    """Evaluated before its first step and after its last one, whose loss is not finite."""
    with RunWriter(tmp_path / "run", {}) as writer:
        writer.add_scalars(0, eval_loss=2.5)
        writer.add_scalars(1, loss=2.0, microbatches=1.0)
        writer.add_scalars(2, loss=math.nan, microbatches=1.0)
        writer.add_scalars(2, eval_loss=2.25)
    return tmp_path / "run"


def test_the_page_counts_steps(evaluated, tmp_path):
    page = html(None, {"run": open_run(evaluated)}, tmp_path / "page.html").read_text()
    assert ": 2 steps." in page
    assert re.search(r'<th scope="row">Steps</th>\s*<td>2</td>', page)
    assert "3 steps" not in page


def test_the_terminal_counts_steps(evaluated, capsys):
    main(["report", str(evaluated)])
    assert "run: 2 steps, loss 2 to 2, no tensor to judge" in capsys.readouterr().out


def test_a_row_of_an_evaluation_alone_has_no_loss_to_be_missed(evaluated):
    first, second, third = text_of(open_run(evaluated)).split("\n\n")[1:]
    assert first == "step 0\n  eval_loss 2.5"
    assert "loss 2.0" in second
    assert "  loss nan" in third


def test_a_run_that_only_evaluated_made_no_step(tmp_path, capsys):
    with RunWriter(tmp_path / "run", {}) as writer:
        writer.add_scalars(0, eval_loss=2.5)
    main(["report", str(tmp_path / "run")])
    assert "run: 0 steps, no tensor to judge" in capsys.readouterr().out
