"""Without a GPU, Triton's kernels run in its interpreter, which must be said before they are imported."""

import os
from pathlib import Path

import pytest
import torch
from tests import quick_interpreter
from tests.warm import Warm

import narrowgauge

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.install()


@pytest.fixture(scope="session", autouse=True)
def compiled_walk():
    """No test is about passes because nobody has compiled yet; of several workers one compiles."""
    from narrowgauge.observe.stats import host

    host.wait()


@pytest.fixture(scope="session")
def warm_python():
    """Programs start in it without loading torch again."""
    warm = Warm(Path(narrowgauge.__file__).parents[1])
    yield warm
    warm.close()
