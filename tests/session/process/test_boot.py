"""How a run ends: each program gets the exit code and the one message that it deserves, and keeps what was recorded."""

import subprocess
import sys

import pytest
from tests.session import programs

from narrowgauge.observe.store import open_run
from narrowgauge.session.plan import Plan
from narrowgauge.session.process import boot


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a program in this process as a child process would; returns (exit code, output, the run)."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)

    def go(program, *args, **plan):
        (tmp_path / "train.py").write_text(program)
        code = boot.run_plan(Plan(variant="x", out=str(tmp_path / "run"), command=("train.py", *args), **plan))
        said = capfd.readouterr()
        return code, said.out + said.err, open_run(tmp_path / "run")

    return go


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (programs.NO_OPTIMIZER, "it made no torch.optim optimizer; give the script that trains"),
        (programs.NO_BACKWARD, "backward() was never called"),
        (programs.NO_STEP, "its optimizer never stepped"),
        ("print('hello')", "without a training step"),
    ],
)
def test_programs_without_a_step_end_with_2_and_the_reason(run, program, says):
    code, output, recorded = run(program)
    assert code == 2
    assert says in output
    assert "Traceback" not in output
    assert recorded.status == "failed"
    assert says in recorded.meta["error"]


def test_a_program_without_a_module_still_has_its_losses(run):
    code, _, recorded = run(programs.NO_MODEL)
    assert code == 0
    assert len(recorded.scalars("loss")["step"]) == 3
    assert recorded.meta["models"] == 0


def test_converting_a_program_without_a_module_is_told(run):
    code, output, _ = run(programs.NO_MODEL, recipe="current")
    assert code == 2
    assert "no torch.nn.Module with parameters of its optimizer was called" in output


def test_a_program_that_raises_shows_its_own_traceback_and_keeps_its_steps(run):
    code, output, recorded = run(programs.RAISES)
    assert code == 1
    assert 'raise ValueError("the loader is empty")' in output
    assert "runpy" not in output
    assert "narrowgauge/session" not in output
    assert recorded.meta["error"] == "ValueError: the loader is empty"
    assert len(recorded.scalars("loss")["step"]) == 8


def test_a_program_s_own_exit_code_is_kept(run):
    code, _, recorded = run(programs.EXITS)
    assert code == 7
    assert recorded.meta["exit_code"] == 7
    assert recorded.meta["steps"] == 8


def test_a_syntax_error_is_the_program_s_own(run):
    code, output, _ = run("def broken(:\n")
    assert code == 1
    assert "SyntaxError" in output
    assert "narrowgauge" not in output


def test_nothing_to_convert_ends_with_2(run):
    code, output, recorded = run(programs.NO_LINEAR, recipe="current")
    assert code == 2
    assert "no linear layer to convert" in recorded.meta["error"]
    assert "Traceback" not in output


def test_several_models_without_an_eligible_layer_end_with_2(run):
    code, output, recorded = run(programs.GAN.replace("16", "12").replace("32", "20"), recipe="current")
    assert code == 2
    assert output.count("none of the 2 linear layers of Sequential can be converted") >= 1
    assert recorded.status == "failed"
    assert "Traceback" not in output


def test_shapes_that_do_not_fit_stay_high_and_say_so(run):
    code, _, recorded = run(programs.ODD_SHAPES, recipe="current")
    # No layer of 60 features can run in FP8, so there is nothing to convert.
    assert code == 2
    assert "16" in recorded.meta["error"]


def test_non_finite_inputs_stay_visible_in_fp8(run):
    code, _, recorded = run(programs.NAN_INPUT, recipe="current", every=1)
    assert code == 0
    assert recorded.meta["nan_steps"] == 3
    steps, counts = recorded.series("0:input", "nan_count")
    assert counts[list(steps).index(6)] >= 1


def test_a_run_can_be_watched_converted_and_read_back(run):
    code, _, recorded = run(programs.BASIC, "20", recipe="delayed", every=5, steps=10)
    assert code == 0
    assert recorded.status == "complete"
    assert recorded.meta["notes"] == ["The script was ended after 10 optimizer steps, as --steps asked."]
    assert recorded.meta["steps"] == 10
    assert recorded.meta["recipe"] == "delayed"
    assert recorded.meta["formats"] == {"input": "E4M3FN", "weight": "E4M3FN", "grad_output": "E5M2"}
    assert {"0:input", "0:weight", "0:grad_output", "0:output"} <= set(recorded.sites)
    steps, gain = recorded.series("2:weight", "gain")
    assert steps.tolist() == [5, 10]
    assert gain == pytest.approx(1.0, abs=0.02)


def test_a_program_that_makes_fewer_steps_than_asked_says_so(run):
    code, _, recorded = run(programs.BASIC, "8", steps=600)
    assert (code, recorded.meta["steps"]) == (0, 8)
    said = "The script ended by itself after 8 optimizer steps: --steps 600 can only end one earlier."
    assert recorded.meta["notes"] == [said]


def test_the_child_refuses_to_be_started_by_hand():
    done = subprocess.run(
        [sys.executable, "-m", "narrowgauge.session.process.boot"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "started by narrowgauge itself" in done.stderr
