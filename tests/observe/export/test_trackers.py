"""Each tracker's own reader finds what the run's Parquet files hold."""

import json
import math
import os
import shutil
import socket
import struct
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tests.observe.export.recorded import EVERY, SITES, STEPS, column, export, scalars, summary
from tests.ports import free_port

import narrowgauge.observe.export as export_package
from narrowgauge.metrics import by_name
from narrowgauge.observe.export.names import KNOWN, make
from narrowgauge.observe.export.names import METRICS as ALL
from narrowgauge.observe.store import RunWriter

METRICS = [("amax", "input"), ("amax", "weight"), ("amax", "output"), ("sqnr_db", "input"), ("sqnr_db", "weight")]
LOOKS = range(EVERY, STEPS + 1, EVERY)
CHOSEN = "layers.1.up:input"


def same(found, wanted, name, rel=0.0):
    """A curve {step: value} that a tracker shows, beside the stored one."""
    assert sorted(found) == sorted(wanted), name
    for step, value in wanted.items():
        if math.isnan(value):
            assert math.isnan(float(found[step])), (name, step)
        else:
            assert float(found[step]) == pytest.approx(value, rel=rel, abs=0), (name, step)


def all_same(curves, run, rel=0.0):
    """`curves(name)` of every scalar of the run and every summary of its tensors."""
    stored = scalars(run)
    assert stored.keys() == {"loss", "lr", "tokens", "nonfinite", "data_digest"}
    for name in stored.keys() - {"data_digest"}:
        same(curves(f"run/{name}"), stored[name], name, rel)
    for metric, role in METRICS:
        for stat in ("min", "median", "max"):
            wanted = {step: summary(run, metric, role, step)[stat] for step in LOOKS}
            same(curves(f"tensors/{metric}/{role}/{stat}"), wanted, (metric, role, stat), rel=max(rel, 1e-12))


def test_adapters_are_short():
    folder = Path(export_package.__path__[0])
    for known in KNOWN.values():
        module = known.adapter.partition(":")[0]
        assert len((folder / f"{module}.py").read_text().splitlines()) < 80, module


def test_tensorboard(run):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follower = export(make("tensorboard", run, {}), run, [CHOSEN])
    assert (follower.problem, follower.step) == ("", STEPS)
    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    all_same(lambda tag: {e.step: e.value for e in read.Scalars(tag)}, run, rel=1e-7)  # it keeps float32
    assert len(read.Tags()["scalars"]) == 4 + 3 * len(METRICS) + 2
    same({e.step: e.value for e in read.Scalars(f"tensors/sites/{CHOSEN.replace(':', '.')}/amax")},
         {step: value_of(run, step) for step in LOOKS}, CHOSEN, rel=1e-7)  # fmt: skip
    times = {e.step: e.wall_time for e in read.Scalars("run/loss")}
    assert sorted(times.values()) == [times[step] for step in sorted(times)]
    text = {tag: [e.tensor_proto.string_val[0].decode() for e in read.Tensors(tag)] for tag in read.Tags()["tensors"]}
    assert text["events/nan"] == ["step 7: the loss is not finite"]
    assert text["events/watch_failed"] == [f"step 7 at {SITES[0]}: no room"]
    assert text["events/note"] == [f"step {STEPS}: two layers were passed over"]
    assert "| command | train.py |" in text["run"][0]
    assert "| sqnr_db/input | layers." in text["worst"][-1]


def value_of(run, step):
    return column(run, "amax", "input", step)[CHOSEN]


def wandb_run(path, patience=30.0):
    """All records of W&B's own file: its process may still write when a run that was finished is left."""
    until = time.monotonic() + patience
    while True:
        records = list(wandb_records(path))
        if any(record.HasField("exit") for record in records) or time.monotonic() > until:
            return records
        time.sleep(0.1)


def wandb_records(path):
    """W&B's own file: a log in LevelDB's format (blocks of 32 KiB; checksum, length and type before each piece)."""
    from wandb.proto import wandb_internal_pb2 as messages

    data, at, pieces = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = messages.Record()
            record.ParseFromString(pieces)
            pieces = b""
            yield record


def children():
    """The processes that this one has started, where the system tells."""
    return {child for told in Path("/proc/self/task").glob("*/children") for child in told.read_text().split()}


def test_wandb_offline(run, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "online")  # the table goes before it
    before = children()
    follower = export(make("wandb", run, {"mode": "offline", "project": "p", "name": "mine"}), run, [CHOSEN])
    assert follower.problem == ""
    assert children() <= before  # W&B's own process, which writes the file, has ended: nothing of it can be cut off
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    curves, ended = {}, None
    for record in wandb_run(path):
        if record.HasField("run"):
            about = record.run
        if record.HasField("exit"):
            ended = record.exit.exit_code
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                curves.setdefault(name, {})[row["step"]] = value
    assert {"run/loss", "run/lr", "run/tokens", "run/nonfinite"} <= curves.keys(), (ended, path.stat().st_size)
    all_same(curves.__getitem__, run)
    assert (about.project, about.display_name, ended) == ("p", "mine", 0)
    config = {item.key: item.value_json for item in about.config.update}
    assert config["command"] == '"train.py"'
    assert curves["events/nan"] == {7: "step 7: the loss is not finite"}


def test_mlflow(run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    for _ in range(2):  # the experiment may be there already
        follower = export(make("mlflow", run, {"uri": uri, "experiment": "fp8"}), run, [CHOSEN])
        assert follower.problem == ""
    client = MlflowClient(tracking_uri=uri)
    found = client.search_runs([client.get_experiment_by_name("fp8").experiment_id])
    assert len(found) == 2
    made = found[0]
    assert (made.info.run_name, made.info.status) == ("run", "FINISHED")

    all_same(lambda name: {m.step: m.value for m in client.get_metric_history(made.info.run_id, name)}, run)
    assert made.data.params["versions/torch"] == "9.9"
    assert made.data.tags["events/nan"] == "step 7: the loss is not finite"
    assert made.data.metrics["events/watch_failed"] == 1.0
    assert made.data.tags["worst/sqnr_db/input"].startswith("layers.")


def test_mlflow_takes_sites_whose_names_have_characters_that_it_refuses(tmp_path, monkeypatch):
    """A whole tracker was dropped for a module in a `ModuleDict` of edge types, and its run said RUNNING for ever."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    site = "convs.<user___rates___item>.lin[0]:input"
    with RunWriter(tmp_path / "run") as writer:
        writer.add_tensors(1, [site], {"amax": np.array([2.5])})
    uri = (tmp_path / "mlruns").as_uri()
    follower = export(make("mlflow", tmp_path / "run", {"uri": uri}), tmp_path / "run", ["convs"])
    assert follower.problem == ""
    client = MlflowClient(tracking_uri=uri)
    (made,) = client.search_runs([client.get_experiment_by_name("narrowgauge").experiment_id])
    assert made.info.status == "FINISHED"
    assert made.data.metrics["tensors/sites/convs._user___rates___item_.lin_0_.input/amax"] == 2.5
    assert made.data.tags["worst/amax/input"] == site


def test_mlflow_without_its_server_is_told_within_seconds(run, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    for name in ("MAX_RETRIES", "TIMEOUT"):
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}", raising=False)
    exporter = make("mlflow", run, {"uri": f"http://127.0.0.1:{free_port()}"})
    began = time.monotonic()
    assert "Connection refused" in export(exporter, run, []).problem
    assert time.monotonic() - began < 30  # it asked for two minutes
    assert not {name for name in os.environ if name.startswith("MLFLOW_HTTP")}


def parsed(text):
    """{(name, role): value} of an exposition, without the run's label."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {s.labels["run"] for s in samples} == {"run"}
    return {(s.name, *(v for k, v in sorted(s.labels.items()) if k != "run")): s.value for s in samples}


def last_of(run):
    """What the gauges must show in the end."""
    stored = scalars(run)
    gauges = {("narrowgauge_loss",): stored["loss"][STEPS], ("narrowgauge_lr",): 1e-3, ("narrowgauge_step",): STEPS}
    gauges[("narrowgauge_tokens_so_far",)] = sum(stored["tokens"].values())
    gauges[("narrowgauge_nonfinite_so_far",)] = 1
    gauges[("narrowgauge_events", "nan")] = 1
    for metric, role in METRICS:
        for stat, value in summary(run, metric, role, STEPS).items():
            gauges[f"narrowgauge_{metric}_{stat}", role] = value
    return gauges


def test_prometheus_file(run):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    assert export(make("prometheus", run, {}), run, [CHOSEN]).problem == ""
    found = parsed((run / "metrics.prom").read_text())
    wanted = last_of(run)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert found["narrowgauge_up",] == 0
    assert found["narrowgauge_site", "amax", "input", CHOSEN] == value_of(run, STEPS)
    worst = [key for key in found if key[0] == "narrowgauge_worst"]
    assert len(worst) == len(METRICS)  # of the last step alone


def test_prometheus_says_what_a_metric_is_and_names_no_site_for_what_is_nowhere(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with RunWriter(tmp_path / "run") as writer:
        columns = {"nan_count": np.zeros(2), "sqnr_db": np.array([30.0, 31.0])}
        writer.add_tensors(1, ["a:input", "b:input"], columns)
    assert export(make("prometheus", tmp_path / "run", {}), tmp_path / "run").problem == ""
    text = (tmp_path / "run" / "metrics.prom").read_text()
    assert {key for key in parsed(text) if key[0] == "narrowgauge_worst"} == {
        ("narrowgauge_worst", "sqnr_db", "input", "a:input")
    }
    said = by_name("sqnr_db").meaning
    assert f"# HELP narrowgauge_sqnr_db_min min over a role's sites. {said}" in text


def test_prometheus_file_in_a_folder_that_is_not_there_yet(run, tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    file = tmp_path / "sub" / "dir" / "m.prom"
    assert export(make("prometheus", run, {"file": str(file)}), run).problem == ""
    assert parsed(file.read_text())["narrowgauge_up",] == 0
    for wrong, why in ((tmp_path / "sub" / "dir", "Is a directory"), (file / "m.prom", "File exists")):
        problem = export(make("prometheus", run, {"file": str(wrong)}), run).problem
        assert problem == f"OSError: cannot write {wrong}: {why}; give another file."


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_prometheus_replaces_nothing_but_a_file(run, tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    problem = export(make("prometheus", run, {"file": str(pipe)}), run).problem
    why = "it is no file, and would be replaced by one"
    assert problem == f"OSError: cannot write {pipe}: {why}; give another file."
    assert pipe.is_fifo()


def test_prometheus_sums_no_tokens_of_a_run_that_has_no_row_of_some_steps(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    found = {}
    for name, steps in (("all", (0, 1, 2, 3)), ("some", (1, 2, 9, 10, 11)), ("brief", (1, 2, 3, 4))):
        with RunWriter(tmp_path / "run") as writer:
            for step in steps:
                tokens = {} if name == "brief" and step == 3 else {"tokens": 8.0}
                writer.add_scalars(step, nonfinite=float(step == 2), **tokens)
        export(make("prometheus", tmp_path / "run", {}), tmp_path / "run")
        found[name] = parsed((tmp_path / "run" / "metrics.prom").read_text())
        shutil.rmtree(tmp_path / "run")
    assert found["all"]["narrowgauge_tokens_so_far",] == 32.0
    for some in ("some", "brief"):
        assert ("narrowgauge_tokens_so_far",) not in found[some]
    assert [each["narrowgauge_nonfinite_so_far",] for each in found.values()] == [1.0, 1.0, 1.0]


def test_prometheus_port(run):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    exporter = make("prometheus", run, {"port": port})
    seen = {}

    def scrape(status):
        # Without Accept-Encoding and in OpenMetrics' own format, as Prometheus asks for it.
        ask = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask, timeout=20) as answer:
            seen["type"], seen["text"] = answer.headers["Content-Type"], answer.read().decode()
        close(status)

    close, exporter.close = exporter.close, scrape
    assert export(exporter, run).problem == ""
    assert "openmetrics" in seen["type"]
    found = parsed(seen["text"].replace("# EOF\n", ""))
    assert found["narrowgauge_up",] == 1
    wanted = last_of(run)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in str(thread)]


def test_two_runs_on_one_port(run):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        follower = export(make("prometheus", run, {"port": port}), run)
    assert follower.problem == f"OSError: port {port}: Address already in use; give another one."


def test_about_fifty_gauges(tmp_path):
    """With every metric that goes out, and what a watched step of an AMP program has."""
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with RunWriter(tmp_path) as writer:
        names = [
            "loss",
            "grad_norm",
            "lr",
            "step_seconds",
            "microbatches",
            "tokens",
            "clean",
            "nonfinite",
            "loss_scale",
            "eval_loss",
        ]
        writer.add_scalars(1, **dict.fromkeys(names, 1.0))
        sites = [f"a:{role}" for role in ("input", "output")]
        columns = {}
        for metric in ALL:
            has = ["input" in by_name(metric).roles, "output" in by_name(metric).roles]
            columns[metric] = np.where(has, 1.0, np.nan)
        writer.add_tensors(1, sites, columns)
    export(make("prometheus", tmp_path, {}), tmp_path)
    text = (tmp_path / "metrics.prom").read_text()
    assert 45 <= text.count("# TYPE") <= 60
