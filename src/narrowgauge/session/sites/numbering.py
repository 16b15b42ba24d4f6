"""Layers that a rank numbers from 0, though they are others in the whole model: Megatron-Core's pipeline stages,
experts of Megatron-Core and DeepSpeed that are spread over ranks.

    layers           of Megatron-Core, whose `layer_number` counts on:       decoder.layers.0 is decoder.layers.4
    local_experts    of the rank in `ep_group`, next to them or above:       local_experts.0 is local_experts.6

So every rank's layers have the names that they have in a checkpoint of the whole.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from torch import distributed as dist
from torch import nn

from narrowgauge.session.sites.census import plain_name

EXPERTS = ("local_experts", "deepspeed_experts")


class Numbering(NamedTuple):
    """The paths of a model's lists, each with a dot, and by how much their numbers are behind; the inner ones first.

    >>> Numbering((("layers.0.local_experts.", 6), ("layers.", 4)))("layers.0.local_experts.1.fc1")
    'layers.4.local_experts.7.fc1'
    """

    behind: tuple[tuple[str, int], ...] = ()

    def __call__(self, module: str) -> str:
        """A module's name in the whole model."""
        return _whole(self.behind, module) if self.behind else module


def numbering(model: nn.Module) -> Numbering:
    """What is known of a model's lists; nothing of numbers that are not ahead."""
    found = [
        (plain_name(f"{path}."), behind)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and (behind := _layers(module) or _experts(model, path)) > 0
    ]
    return Numbering(tuple(sorted(found, key=lambda each: -each[0].count("."))))


def _layers(layers: nn.ModuleList) -> int:
    if not all(type(layer).__module__.startswith("megatron.") for layer in layers):
        return 0  # others may count as they like
    numbers = [number for layer in layers if isinstance(number := getattr(layer, "layer_number", None), int)]
    behind = {number - 1 - at for at, number in enumerate(numbers)} if len(numbers) == len(layers) else set()
    return behind.pop() if len(behind) == 1 else 0  # or all have the same: nobody has numbered them


def _experts(model: nn.Module, path: str) -> int:
    *above, name = path.split(".")
    if name not in EXPERTS or not dist.is_initialized():
        return 0
    owners = (model.get_submodule(".".join(above[:end])) for end in range(len(above), len(above) - 2, -1) if end >= 0)
    group = next((group for owner in owners if (group := getattr(owner, "ep_group", None)) is not None), None)
    return 0 if group is None else dist.get_rank(group) * len(list(model.get_submodule(path).children()))


@cache
def _whole(behind: tuple[tuple[str, int], ...], module: str) -> str:
    for path, by in behind:
        if module.startswith(path):
            number, dot, rest = module[len(path) :].partition(".")
            if number.isdigit():
                module = f"{path}{int(number) + by}{dot}{rest}"
    return module
