"""TransformerEngine's layers, which need a GPU: the check runs there, and here its transcript is looked at."""

import re
import subprocess
import sys

import pytest
from tests.integrations.works_with import ROOT, WorksWith

WORKS = WorksWith(
    "TransformerEngine",
    ("transformer-engine",),
    "delayed, current and blockwise; `Linear`, `LayerNormLinear`, `LayerNormMLP`, `GroupedLinear`",
    where="1 GPU",
)
CHECK = "benchmarks.gpu_check_transformer_engine"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_as_without_us_and_every_tensor_is_what_it_is_by_hand():
    if WORKS.missing():
        pytest.skip(WORKS.missing())
    done = subprocess.run([sys.executable, "-m", CHECK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_what_the_readme_says_is_what_was_run():
    text = (ROOT / "benchmarks" / "results" / "gpu_transformer_engine_h200.txt").read_text()
    assert f"transformer_engine {WORKS.pinned['transformer-engine']}," in text.splitlines()[0]
    assert f"python -m {CHECK}" in text
    passed, tried = re.search(r"^(\d+) of (\d+) cases as they should be$", text, re.MULTILINE).groups()
    assert passed == tried
    for recipe in ("delayed", "current", "blockwise"):
        assert re.search(rf"^training, {recipe}\n  \d+ losses the same to the bit", text, re.MULTILINE)
        for layer in re.findall(r"`(\w+)`", WORKS.seen):
            assert f"\n{recipe}, {layer}\n" in text
