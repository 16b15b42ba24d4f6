"""The whole command, in processes of its own: from a script to a verdict, a page, and every way it can end early."""

import json
from types import SimpleNamespace

import pytest
from tests.session import programs

from narrowgauge.cli.main import main
from narrowgauge.observe.store import open_run
from narrowgauge.observe.verdict import Verdict
from narrowgauge.session.compare import Comparison, cadence, compare
from narrowgauge.session.config import load
from narrowgauge.session.process.launch import Ended


def command(tmp_path, program, *flags, args=()):
    script = tmp_path / "train.py"
    script.write_text(program)
    return ["compare", "--out", str(tmp_path / "out"), *flags, "--", str(script), *args]


def ends_with(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    said = capsys.readouterr()
    return stop.value.code, said.out + said.err


@pytest.fixture
def warm(warm_python, monkeypatch):
    """Runs are forks of a process that has torch loaded; without it they are processes of their own."""
    warm_python.instead(monkeypatch)


@pytest.fixture(scope="module")
def compared(warm_python, tmp_path_factory):
    """One small comparison of two recipes; its folder."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        warm_python.instead(patch)
        main(command(folder, programs.COMPILED, "--recipes", "current,rowwise", args=("24",)))
    return folder / "out"


def test_the_verdict_compares_what_it_should(compared):
    verdict = Verdict.from_dict(json.loads((compared / "verdict.json").read_text()))
    assert verdict.judged
    assert verdict.steps == 24
    assert (verdict.baseline.dtype, verdict.baseline.counted) == ("float32", "samples")
    assert [v.name for v in verdict.variants] == ["current", "rowwise"]
    for variant in verdict.variants:
        assert variant.gap_pct is not None
        assert variant.band_pct is not None
        assert len(variant.same_weights) == 4
        assert all(s.grad_cosine > 0.9 for s in variant.same_weights)
        assert variant.eval_name == "eval loss"
        assert len(variant.worst) == 5
        assert variant.flop_share_pct == pytest.approx(100.0)
        assert variant.speedup is None
    assert any("torch.compile" in note for note in verdict.notes)


def test_the_twins_saw_the_same(compared):
    runs = [open_run(compared / name) for name in ("noise", "baseline", "current", "rowwise")]
    assert len({run.meta["weights_hash"] for run in runs}) == 1
    digests = [tuple(run.scalars("data_digest")["data_digest"]) for run in runs]
    assert len(set(digests)) == 1
    assert len(digests[0]) == 24


def test_probing_leaves_the_baseline_as_it_was(compared, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # a comparison runs eager, a watched run as its program asks
    main(["run", "--out", str(tmp_path / "plain"), "--", str(compared.parent / "train.py"), "24"])
    probed, plain = open_run(compared / "baseline"), open_run(tmp_path / "plain")
    assert probed.scalars("loss")["loss"].tolist() == plain.scalars("loss")["loss"].tolist()


def test_the_page_and_the_text(compared, capsys):
    assert "<html" in (compared / "report.html").read_text()[:500]
    main(["report", str(compared / "current"), "--text"])
    assert "loss" in capsys.readouterr().out
    main(["report", str(compared), "-o", str(compared / "again.html")])
    assert (compared / "again.html").stat().st_size > 100_000


def test_a_script_that_raises_ends_the_comparison_with_its_own_code(tmp_path, capsys):
    code, text = ends_with(command(tmp_path, programs.EXITS), capsys)
    assert code == 7
    assert "the script ended with exit code 7 as written, before any FP8" in text
    assert "step 8 eval" in text  # its own last lines
    assert "Traceback" not in text
    assert open_run(tmp_path / "out" / "noise").meta["steps"] == 8


def test_a_run_s_exit_code_is_the_program_s(tmp_path, capfd):
    (tmp_path / "train.py").write_text(programs.EXITS)
    code, _ = ends_with(["run", "--out", str(tmp_path / "out"), "--", str(tmp_path / "train.py")], capfd)
    assert code == 7


@pytest.mark.usefixtures("warm")
def test_nothing_to_convert_is_one_message(tmp_path, capsys):
    code, text = ends_with(command(tmp_path, programs.NO_LINEAR, "--recipes", "current"), capsys)
    assert code == 2
    assert "there is nothing to compare: " in text
    assert not (tmp_path / "out" / "baseline").exists()  # told before hours were spent
    assert "no linear layer to convert" in text


@pytest.mark.usefixtures("warm")
def test_a_model_called_by_its_parts_is_measured_as_it_is_trained(tmp_path):
    main(command(tmp_path, programs.METHOD, "--recipes", "current"))
    verdict = Verdict.from_dict(json.loads((tmp_path / "out" / "verdict.json").read_text()))
    [variant] = verdict.variants
    layers = {name for name, *_ in variant.same_weights[0].layers}
    assert {"up.weight", "lm_head.weight"} <= layers
    assert 0 < variant.flop_share_pct < 50  # up, 32 x 32, not lm_head, 32 x 64


@pytest.mark.usefixtures("warm")
def test_other_data_in_every_run_is_not_judged(tmp_path):
    main(command(tmp_path, programs.UNSEEDED_DATA, "--recipes", "current"))
    verdict = Verdict.from_dict(json.loads((tmp_path / "out" / "verdict.json").read_text()))
    assert not verdict.judged
    assert "saw other data than the baseline" in verdict.why_not
    assert verdict.variants[0].outcome == "unjudged"


@pytest.mark.parametrize(("total", "expected"), [(None, 10), (1000, 10), (100, 5), (12, 1), (1, 1)])
def test_short_runs_are_recorded_more_often(total, expected):
    assert cadence(10, total) == expected


def test_trackers_can_tell_the_runs_of_a_comparison_apart(tmp_path, monkeypatch):
    (tmp_path / "ng.toml").write_text(
        '[export]\nwandb = { name = "nightly", mode = "offline" }\ntensorboard = { dir = "board" }\nmlflow = {}\n'
    )
    script = tmp_path / "train.py"
    script.write_text("")
    plans = []
    monkeypatch.setattr("narrowgauge.session.compare.launch", lambda plan, tell: plans.append(plan) or Ended(0, (), 0))
    what = Comparison((str(script),), tmp_path / "out", ("current", "rowwise"), config=load(tmp_path / "ng.toml"))
    compare(what, SimpleNamespace(begin=print, tell=print, end=print))
    names = ["noise", "baseline", "current", "rowwise"]
    assert [plan.variant for plan in plans] == names
    assert [plan.export["wandb"]["name"] for plan in plans] == [f"nightly-{name}" for name in names]
    assert {plan.export["wandb"]["mode"] for plan in plans} == {"offline"}
    assert [plan.export["tensorboard"]["dir"] for plan in plans] == [f"board/{name}" for name in names]
    assert all(plan.export["mlflow"] is not None for plan in plans)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("program", [programs.NO_MODEL, programs.NO_OPTIMIZER, programs.ODD_SHAPES])
def test_nothing_to_compare_is_one_message_after_one_run(tmp_path, capsys, program):
    code, text = ends_with(command(tmp_path, program), capsys)
    assert code == 2
    assert text.count("narrowgauge:") == 1
    assert "there is nothing to compare: " in text
    assert not (tmp_path / "out" / "baseline").exists()
    assert open_run(tmp_path / "out" / "noise").status == "failed"
