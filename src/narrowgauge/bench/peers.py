"""What users would pick instead, made ready to stand beside us in the same process.

    torchao             tensorwise, rowwise        convert_to_float8_training, the recipe by its name; on a CPU emulated
    transformerengine   current                    its Linear in the place of nn.Linear, only if it can be imported

Both are optional. Asking for one that is not installed is an error that says how to get it, never a missing row.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from narrowgauge.errors import UsageError, in_one_line, nearest

# peer -> its recipes
PEERS = {"torchao": ("tensorwise", "rowwise"), "transformerengine": ("current",)}
_MODULES = {"torchao": "torchao.float8", "transformerengine": "transformer_engine.pytorch"}
_INSTALL = {"torchao": "pip install torchao", "transformerengine": "pip install transformer_engine[pytorch]"}


def check_peer(name: str) -> None:
    """Raise UsageError unless the peer is known and can be imported."""
    if name not in PEERS:
        raise UsageError(f"no peer is called {name!r}; {nearest(name, PEERS)}")
    package = _MODULES[name].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--peer {name}: {package} is not installed, so there is nothing to compare with; "
                         f"{_INSTALL[name]}, or leave --peer out.")  # fmt: skip
    try:
        importlib.import_module(_MODULES[name])
    except Exception as error:  # a build for another torch fails in ways of its own
        cause = in_one_line(error)
        raise UsageError(f"--peer {name}: {_MODULES[name]} cannot be imported ({cause}).") from error


def apply_peer(model: nn.Module, peer: str, recipe: str, keep: str) -> nn.Module:
    """Convert the linear layers of `model` with `peer`, but for those whose name ends in `keep`; returns the model."""
    check_peer(peer)
    appliers: dict[str, Callable[[nn.Module, str, str], nn.Module]] = {"torchao": _torchao, "transformerengine": _te}
    return appliers[peer](model, recipe, keep)


def _torchao(model: nn.Module, recipe: str, keep: str) -> nn.Module:
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    if not next(model.parameters()).is_cuda:  # where torch has not all of its products
        config = replace(config, emulate=True)
    converted: nn.Module = float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: not name.endswith(keep)
    )
    return converted


def _te(model: nn.Module, recipe: str, keep: str) -> nn.Module:
    te: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not f"{name}.{child_name}".endswith(keep):
                N, K = child.weight.shape
                new = te.Linear(K, N, bias=child.bias is not None, params_dtype=child.weight.dtype)
                with torch.no_grad():
                    new.weight.copy_(child.weight)
                    if child.bias is not None:
                        new.bias.copy_(child.bias)
                setattr(module, child_name, new)
    forward = model.forward

    def in_fp8(*args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipes.Float8CurrentScaling()):
            return forward(*args, **kwargs)

    model.forward = in_fp8
    return model
