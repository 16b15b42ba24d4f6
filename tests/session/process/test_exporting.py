"""`narrowgauge run` exports beside the program, which knows nothing of it, loads nothing of it and never waits."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from tests.observe.export.test_trackers import wandb_run
from tests.session import programs
from tests.session.test_watch import NARROWGAUGE, PLAIN

from narrowgauge.cli.main import cli
from narrowgauge.errors import UsageError
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.session.plan import Plan
from narrowgauge.session.process import exporting as module
from narrowgauge.session.process.exporting import exporting
from narrowgauge.session.process.launch import watch

TRACKERS = "{'tensorboard', 'wandb', 'mlflow', 'prometheus_client', 'pydantic'}"
LOADED = f"\nimport sys\nprint({TRACKERS} & set(sys.modules))\n"


def test_a_watched_program_is_exported_beside_it_and_a_tracker_that_fails_is_told(tmp_path, monkeypatch, capfd):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(programs.BASIC + LOADED)
    (tmp_path / "out").mkdir()
    export = {"tensorboard": {"dir": "board"}, "prometheus": {"file": "train.py/x.prom"}, "sites": ["lm_head"]}
    plan = Plan(variant="asis", out="out", command=("train.py",), every=4, judge="current", export=export)
    plan.write()
    code = watch(plan, [sys.executable, "train.py"])
    run, said = open_run(tmp_path / "out"), capfd.readouterr()

    assert (code, run.status) == (0, "complete")
    assert said.out.endswith("finished\nset()\n")
    told = said.err.removeprefix("narrowgauge: ").removesuffix("\n").split("\nnarrowgauge: ")
    assert told[0].startswith("export to Prometheus stopped after step ")
    assert told[0].endswith(": OSError: cannot write train.py/x.prom: File exists; give another file.")
    assert told[1:] == []
    unmet = ["export.sites: no recorded site matches 'lm_head'; there are: '0', '2', '4'."]
    assert (run.meta["notes"], run.meta["unmet"]) == ([*told, *unmet], unmet)

    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    loss = {event.step: event.value for event in read.Scalars("run/loss")}
    assert loss == pytest.approx(dict(zip(range(1, 9), run.scalars("loss")["loss"], strict=True)), rel=1e-7)
    assert sum(event.value for event in read.Scalars("run/tokens")) == 8 * 48
    for role in ("input", "weight", "grad_output"):
        values = np.array([run.series(f"{layer}:{role}", "sqnr_db")[1] for layer in (0, 2, 4)])
        for stat, wanted in {"min": values.min(0), "median": np.median(values, 0), "max": values.max(0)}.items():
            found = [(event.step, event.value) for event in read.Scalars(f"tensors/sqnr_db/{role}/{stat}")]
            assert [step for step, _ in found] == [4, 8]
            assert [value for _, value in found] == pytest.approx(wanted, rel=1e-6)


def test_so_it_is_to_weights_and_biases_and_to_mlflow(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    (tmp_path / "train.py").write_text(programs.BASIC + LOADED)
    (tmp_path / "ng.toml").write_text(
        f'[export]\nwandb = {{ mode = "offline", project = "p" }}\nmlflow = {{ uri = "{uri}", experiment = "fp8" }}\n'
    )
    run = watched("run", "--every", "4", "--config", "ng.toml", "--out", "out", "--", "python", "train.py")
    loss = dict(zip(range(1, 9), run.scalars("loss")["loss"].tolist(), strict=True))
    worst = [run.series(f"{layer}:input", "sqnr_db")[1] for layer in (0, 2, 4)]
    lowest = dict(zip((4, 8), np.min(worst, 0), strict=True))

    curves = {}
    (path,) = (tmp_path / "out").glob("wandb/offline-run-*/*.wandb")
    for record in wandb_run(path):
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                curves.setdefault(name, {})[row["step"]] = value
    assert curves["run/loss"] == pytest.approx(loss, rel=1e-12)
    assert curves["tensors/sqnr_db/input/min"] == pytest.approx(lowest, rel=1e-12)

    client = MlflowClient(tracking_uri=uri)
    (made,) = client.search_runs([client.get_experiment_by_name("fp8").experiment_id])
    assert made.info.status == "FINISHED"
    for name, wanted in (("run/loss", loss), ("tensors/sqnr_db/input/min", lowest)):
        found = {m.step: m.value for m in client.get_metric_history(made.info.run_id, name)}
        assert found == pytest.approx(wanted, rel=1e-12)
    assert made.data.tags["worst/sqnr_db/input"].startswith(f"{np.argmin([each[-1] for each in worst]) * 2}:input")


def watched(*words):
    """The run of a program under the command, which has loaded nothing of what it is exported to."""
    env = {**PLAIN, "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run([*NARROWGAUGE, *words], env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout[-15:]) == (0, "finished\nset()\n"), done.stderr
    return open_run("out")


def test_a_site_that_no_program_has_is_told_with_the_file_that_asks_for_it(tmp_path, monkeypatch, capfd):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(programs.BASIC)
    (tmp_path / "ng.toml").write_text("[export]\nprometheus = true\nsites = ['0', 'lm_head']\n")
    done = CliRunner().invoke(cli, ["run", "--every", "4", "--config", "ng.toml", "--out", "out", "--", "train.py"])
    assert done.exit_code == 0, done.output
    said = "export.sites: no recorded site matches 'lm_head'; there are: '0', '2', '4'."
    assert done.stderr == f"narrowgauge: ng.toml: {said}\nnarrowgauge: the run is in out\n"
    assert said not in capfd.readouterr().err  # once is enough
    assert open_run(tmp_path / "out").meta["notes"][-1] == said


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_a_missing_package_is_told_before_anything_starts(tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    (tmp_path / "narrowgauge.toml").write_text("[export]\nprometheus = true\n")
    monkeypatch.setattr("narrowgauge.observe.export.names.find_spec", lambda package: None)
    done = CliRunner().invoke(cli, [verb, "--config", "narrowgauge.toml", "--out", "out", "--", "train.py"])
    assert isinstance(done.exception, UsageError)  # which `main` prints, and ends with 2
    assert "pip install 'narrowgauge[prometheus]'" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_no_settings_start_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module.subprocess, "Popen", None)
    with exporting(tmp_path, {"sites": ["lm_head"]}) as told:
        pass
    assert told == []
    assert list(tmp_path.iterdir()) == []


def stand_in(monkeypatch, code):
    """Start `code` in place of the process that exports."""
    argv = [sys.executable, "-c", code]
    start = module.subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", lambda _, **options: start(argv, **options))


def test_a_process_that_hangs_is_waited_for_and_no_longer(tmp_path, monkeypatch):
    stand_in(monkeypatch, "import time; time.sleep(100)")
    monkeypatch.setattr(module, "GRACE", 0.1)
    began = time.monotonic()
    with exporting(tmp_path, {"wandb": {}}, patience=0.2) as told:
        assert told == []
    assert time.monotonic() - began < 30
    assert told == ["export to Weights & Biases did not end and was killed: some of it is missing there."]


def test_a_process_that_a_signal_ended_is_told(tmp_path, monkeypatch):
    """Its log is empty, and says nothing."""
    stand_in(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with exporting(tmp_path, {"tensorboard": {}}) as told:
        pass
    ended = "killed by SIGKILL (often: out of memory)"
    assert told == [f"export to TensorBoard ended early ({ended}); some of it is missing there."]


def test_one_that_took_all_and_does_not_end_is_told(tmp_path, monkeypatch):
    """A tracker's package waits at exit; what it has not sent then, or written, is lost with it."""
    report = {"wandb": {"step": 1, "problem": "", "notes": ["a note"], "unmet": []}}
    stand_in(
        monkeypatch,
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'export.json')!r}).write_text({json.dumps(report)!r}); "
        "print(flush=True); time.sleep(100)",
    )
    monkeypatch.setattr(module, "GRACE", 0.1)
    with exporting(tmp_path, {"wandb": {}}, patience=0.2) as told:
        while not (tmp_path / "export.log").read_text():
            time.sleep(0.05)
    assert told == [
        "export to Weights & Biases took all, but did not end and was killed: some of it may be missing there.",
        "a note",
    ]


def test_a_process_that_dies_at_once_is_told(tmp_path, monkeypatch):
    stand_in(monkeypatch, "raise SystemExit('no such thing')")
    with exporting(tmp_path, {"tensorboard": {}, "mlflow": {}}) as told:
        time.sleep(0.2)
    assert told == [f"export to TensorBoard, MLflow ended early (exit code 1); {tmp_path / 'export.log'} says why."]
    assert (tmp_path / "export.log").read_text() == "no such thing\n"


def test_what_was_asked_in_vain_of_a_run_that_nobody_may_write_is_told_here(tmp_path, monkeypatch):
    report = {"prometheus": {"step": 1, "problem": "", "notes": [], "unmet": ["export.sites: none of it."]}}
    stand_in(
        monkeypatch,
        f"import sys; sys.stdin.read(); open({str(tmp_path / 'export.json')!r}, 'w').write({json.dumps(report)!r})",
    )
    with RunWriter(tmp_path), exporting(tmp_path, {"prometheus": {}}) as told:
        pass
    assert told == ["export.sites: none of it."]
    with exporting(tmp_path, {"prometheus": {}}) as told:
        pass
    assert told == []
    assert open_run(tmp_path).meta["unmet"] == ["export.sites: none of it."]


def test_the_folder_may_vanish_with_the_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    stand_in(monkeypatch, f"import shutil, sys; sys.stdin.read(); shutil.rmtree({str(folder)!r})")
    with exporting(folder, {"tensorboard": {}}) as told:
        pass
    assert len(told) == 1
