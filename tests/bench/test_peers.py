"""Peers are optional: asked for and missing is an error with the way out, never a missing row."""

import importlib.util
import sys
import types
from dataclasses import dataclass

import pytest
from torch import nn

from narrowgauge.bench import peers
from narrowgauge.bench.variants import choose_variants
from narrowgauge.errors import RecipeError, UsageError


def test_an_unknown_peer_names_the_nearest():
    with pytest.raises(UsageError, match=r"no peer is called 'torchoa'; did you mean 'torchao'\?"):
        peers.check_peer("torchoa")


def test_a_missing_peer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"torchao is not installed.*pip install torchao, or leave --peer out"):
        peers.check_peer("torchao")


def test_a_peer_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match=r"torchao.float8 cannot be imported \(ModuleNotFoundError"):
        peers.check_peer("torchao")


@dataclass(frozen=True)
class Config:
    recipe: str
    emulate: bool = False


def test_torchao_is_asked_by_recipe_name_and_keeps_the_head(monkeypatch):
    asked = {}

    def convert(model, config, module_filter_fn):
        asked.update(config=config, kept=[name for name in ("a", "lm_head") if not module_filter_fn(None, name)])
        return model

    fake = types.ModuleType("torchao.float8")
    fake.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=Config)
    fake.convert_to_float8_training = convert
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    model = nn.Linear(2, 2)
    assert peers.apply_peer(model, "torchao", "rowwise", "lm_head") is model
    assert asked == {"config": Config("rowwise", emulate=True), "kept": ["lm_head"]}


def test_bf16_comes_first_and_nothing_twice():
    found = choose_variants(["fp32", "bf16"], ["current", "CURRENT"], "torchao")
    assert [v.name for v in found] == ["bf16", "fp32", "current", "torchao tensorwise", "torchao rowwise"]


def test_unknown_words_name_the_nearest():
    with pytest.raises(UsageError, match=r"no precision is called 'fp33'; did you mean 'fp32'\?"):
        choose_variants(["fp33"], [], None)
    with pytest.raises(RecipeError, match="did you mean 'current'"):
        choose_variants([], ["curent"], None)
