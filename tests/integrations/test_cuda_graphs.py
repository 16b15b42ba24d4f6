"""Programs whose steps are CUDA graphs, under the command: every number that is promised, by hand of the same tensors.

On a CPU the same program has no graphs: there it shows that what is done by hand is right. The table's row is the
transcript of a GPU, where `benchmarks.gpu_check_cuda_graphs` runs these tests.
"""

import math
import os
import re

import pytest
import torch
from tests.integrations.differences import TOLERANCES, differences
from tests.integrations.outcomes import transcript
from tests.integrations.watched import HERE, OURS, Case
from tests.integrations.works_with import ROOT, WorksWith

WORKS = WorksWith(
    "PyTorch, CUDA graphs",
    ("torch",),
    "a step captured whole, whose replays have no rows of tensors; `make_graphed_callables`; "
    '`torch.compile(mode="reduce-overhead")`; clipping, every second step',
)
TRANSCRIPT = "benchmarks/results/gpu_cuda_graphs_h200.txt"
CHECK = "benchmarks.gpu_check_cuda_graphs"
ON_THE_GPU = {"torch": "2.11.0"}  # what the machine has, not what constraints.txt pins for those without a GPU
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
)
STEPS, RECORDED = range(1, 9), {2, 4, 6, 8}
NAMES = ("numel", "amax", "l2", "mse", "mean", "std", "underflow_pct", "sqnr_db", "gain", "cosine")
# A product that is made once more may be rounded otherwise; in a graph of inductor's it is.
EAGER = {name: TOLERANCES[name] for name in NAMES} | dict.fromkeys(("amax", "scale_min", "scale_max"), 1e-5)
GRAPHS = {"numel": 0.0, **dict.fromkeys(("amax", "l2", "std", "scale_min", "scale_max"), 1e-3), "sqnr_db": 3e-3}


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return request.param


def watched(folder, device, how, warm, compiled="uncompiled"):
    """The program, every second step recorded."""
    visible = {} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": "0"}
    env = {"PYTHONPATH": os.pathsep.join([str(OURS), str(HERE)]), "DEVICE": device, **visible}
    case = Case(folder, "cuda_graphs", warm=warm if device == "cpu" else None, HOW=how, EVERY="2", **env)
    config = folder / "narrowgauge.toml"
    config.write_text(f'[watch]\nevery = 2\ncompiled = "{compiled}"\n')
    ended = case.watched("--every", "2", "--config", str(config), really=device != "cpu")
    assert ended.code == 0, ended.err
    assert case.run().status == "complete"
    return case


def check(case, tolerances, told, recorded=frozenset(RECORDED)):
    """Rows of the recorded steps, and what every step has of scalars, are those by hand; `told` what was compared."""
    want = case.rows_by_hand("watched")
    assert {step for step, _ in want} == recorded
    assert len(want) == len(recorded) * 4 * 3
    assert differences(case.rows(), want, tolerances) == []
    found, scalars = case.run().scalars(), case.scalars_by_hand("watched")[0]
    assert found["step"].tolist() == list(STEPS)
    assert found["loss"].tolist() == pytest.approx(list(case.losses_by_hand("watched")[0].values()), rel=1e-5)
    for name, near in (("lr", 1e-9), ("grad_norm", 1e-5), ("param_norm", 1e-5), ("update_ratio", 1e-4)):
        each = name in ("lr", "grad_norm")
        by_hand = [scalars[step][name] if each or step in RECORDED else math.nan for step in STEPS]
        assert found[name].tolist() == pytest.approx(by_hand, rel=near, nan_ok=True), name
    assert min(row["grad_norm"] for row in scalars.values()) > 0.02  # all were clipped
    told("seen", f"{len(want)} rows of {len(tolerances)} numbers, steps {', '.join(map(str, sorted(recorded)))}")
    told("seen", "loss, learning rate and gradient norm of 8 steps, norm and update of weights in the recorded ones")


def replays(case):
    return [note for note in case.run().meta["notes"] if note.startswith("The program replays its steps")]


def test_a_step_that_is_captured_whole_has_loss_norms_and_update_by_hand(
    tmp_path, device, warm_python, record_property
):
    case = watched(tmp_path, device, "captured", warm_python)
    check(case, EAGER, record_property, frozenset(RECORDED if device == "cpu" else {2}))  # the others are replays
    assert len(replays(case)) == (device != "cpu")


def test_modules_that_are_graphed_have_the_rows_by_hand_in_every_recorded_step(
    tmp_path, device, warm_python, record_property
):
    case = watched(tmp_path, device, "graphed", warm_python)
    check(case, EAGER, record_property)
    assert replays(case) == []


@pytest.mark.parametrize("compiled", ["uncompiled", "graphs"])
def test_what_torch_compile_replays_has_the_rows_by_hand_in_every_recorded_step(
    tmp_path, device, warm_python, record_property, compiled
):
    case = watched(tmp_path, device, "compiled", warm_python, compiled)
    check(case, GRAPHS if compiled == "graphs" else EAGER, record_property)
    assert case.run().meta["watch"].get("steps_in_graphs", 0) == (3 if compiled == "graphs" else 0)
    assert replays(case) == []


def test_every_case_of_the_transcript_is_as_it_should_be():
    text, compared = (ROOT / TRANSCRIPT).read_text(), transcript(TRANSCRIPT, WORKS.packages)
    assert f"# python -m {CHECK}" in text
    for how, rows in (("captured", 12), ("graphed", 48), (r"torch compile .* \(uncompiled\)", 48), (r"\(graphs\)", 48)):
        assert re.search(rf"^.*{how}.*\n  {rows} rows of \d+ numbers", text, re.MULTILINE), how
    assert len(compared["cases"]) == 4
    assert compared["versions"] == ON_THE_GPU
    WORKS.compared.append(compared)
