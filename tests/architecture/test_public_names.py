"""The public names of every package are pinned: adding or dropping one is a decision, made here."""

import importlib

import pytest

import narrowgauge as ng

TOP = [
    "Block", "PerColumn", "PerRow", "PerTensor", "convert", "errors", "formats", "load_scaling_state",
    "measure", "open_run", "quantize", "recipes", "revert", "rules", "scaling_state",
]  # fmt: skip


def test_the_top_level_names():
    assert ng.__all__ == TOP
    assert set(TOP) == set(ng._LAZY)
    assert set(TOP) <= set(dir(ng))


@pytest.mark.parametrize("name", TOP)
def test_every_lazy_name_resolves_to_what_it_says(name):
    value = getattr(ng, name)
    module, attribute = ng._LAZY[name]
    expected = importlib.import_module(module)
    assert value is (getattr(expected, attribute) if attribute else expected)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(AttributeError, match=r"^narrowgauge has no 'quantise'; did you mean 'quantize'\?$"):
        _ = ng.quantise
