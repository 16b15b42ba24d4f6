"""Without a GPU, Triton's kernels run in its interpreter, which must be said before they are imported."""

import gc
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from tests import quick_interpreter
from tests.warm import Warm

import narrowgauge

WATCHED = (  # what a watch puts functions of its own in the places of
    *((torch, "compile"), (torch.autograd, "backward"), (torch.Tensor, "backward"), (os, "_exit")),
    *(
        (torch.optim.Optimizer, "__init__"),
        (torch.optim.Optimizer, "__setstate__"),
        (torch.optim.Optimizer, "zero_grad"),
    ),
    *((torch._C._nn, "mse_loss"), (torch.nn.utils, "clip_grad_norm_")),
)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.install()


def pytest_collection_modifyitems(items):
    """`pytest -m gpu` is what runs on a GPU: a test that is only skipped elsewhere would never run."""
    needs = [item for item in items for mark in item.iter_markers("skipif") if _is_of_gpus(mark)]
    unmarked = sorted({item.nodeid for item in needs if item.get_closest_marker("gpu") is None})
    if unmarked:
        raise pytest.UsageError(f"these need a GPU, and are not marked `gpu`: {', '.join(unmarked)}")


def pytest_unconfigure():
    """What was frozen is taken apart in the end, or libraries tell of it."""
    gc.unfreeze()


def _is_of_gpus(mark):
    return bool(re.search("GPU|CUDA", mark.kwargs.get("reason", "")))


@pytest.fixture(scope="session", autouse=True)
def compiled_walk():
    """No test is about passes because nobody has compiled yet; of several workers one compiles."""
    from narrowgauge.observe.stats import host

    host.wait()


_frozen = 0  # modules, whose objects live as long as the tests


@pytest.fixture(autouse=True)
def quick_collections():
    """Where many modules were loaded, what they hold is not searched for garbage any more, which takes 0.2 s a time."""
    global _frozen
    if len(sys.modules) > _frozen + 50:
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """A watch that is left open hears what later tests of this process compile, train and end."""
    before = [(owner, name, getattr(owner, name)) for owner, name in WATCHED]
    yield
    left = [(owner, name, was) for owner, name, was in before if getattr(owner, name) is not was]
    for owner, name, was in left:
        setattr(owner, name, was)  # later tests are not about it
    assert not left, f"something of the test is still open: {', '.join(name for _, name, _ in left)} is another"


@pytest.fixture(scope="session")
def warm_python():
    """Programs start in it without loading torch again."""
    warm = Warm(Path(narrowgauge.__file__).parents[1])
    yield warm
    warm.close()
