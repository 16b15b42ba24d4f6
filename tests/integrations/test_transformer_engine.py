"""TransformerEngine's layers, which need a GPU: the check runs there, and its transcript is the table's row."""

import re
import subprocess
import sys

import pytest
from tests.integrations.outcomes import transcript
from tests.integrations.works_with import ROOT, WorksWith, pinned

WORKS = WorksWith(
    "TransformerEngine",
    ("transformer-engine",),
    "delayed, current and blockwise: one step of `Linear`, `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear` each; "
    "a loop of all of them, accumulation, a checkpointed block, every second step",
)
TRANSCRIPT = "benchmarks/results/gpu_transformer_engine_h200.txt"
CHECK = "benchmarks.gpu_check_transformer_engine"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_as_without_us_and_every_tensor_is_what_it_is_by_hand():
    if WORKS.missing():
        pytest.skip(WORKS.missing())
    done = subprocess.run([sys.executable, "-m", CHECK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_case_of_the_transcript_is_as_it_should_be():
    text, compared = (ROOT / TRANSCRIPT).read_text(), transcript(TRANSCRIPT, WORKS.packages)
    assert compared["versions"] == pinned(WORKS.packages)
    assert f"# python -m {CHECK}" in text
    for recipe in ("delayed", "current", "blockwise"):
        assert {f"{recipe}, {layer}" for layer in re.findall(r"`(\w+)`", WORKS.seen)} <= {*compared["cases"]}
        assert re.search(rf"^training, {recipe}\n  \d+ losses the same to the bit", text, re.MULTILINE)
        loop = re.search(rf"^loop, {recipe}\n  \d+ losses the same to the bit.*\n((?:  .*\n)+)", text, re.MULTILINE)
        assert len(re.findall(r"^  [\w.]+:(?:input|weight|grad_output) .* dB, worst", loop[1], re.MULTILINE)) == 25
    WORKS.compared.append(compared)
