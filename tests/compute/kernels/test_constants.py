"""Constants of kernels: what Triton does with them before each launch costs next to nothing."""

import copy
import pkgutil
from importlib import import_module

import pytest

tl = pytest.importorskip("triton.language")

from narrowgauge.compute.kernels import fused  # noqa: E402
from narrowgauge.compute.kernels.fused.constant import Constant  # noqa: E402


def test_a_constant_knows_itself_and_its_copy_without_making_new_ones():
    constant = Constant(5)
    assert (constant != copy.deepcopy(constant)) is False
    assert constant != Constant(6)
    assert bool(constant != Constant(5)) is False
    assert isinstance(constant + 1, tl.constexpr)


@pytest.mark.parametrize("module", [f.name for f in pkgutil.walk_packages(fused.__path__, f"{fused.__name__}.")])
def test_every_constant_that_a_kernel_uses_by_name_is_one(module):
    owned = vars(import_module(module))
    slow = [
        name for name, value in owned.items() if isinstance(value, tl.constexpr) and not isinstance(value, Constant)
    ]
    assert not slow
