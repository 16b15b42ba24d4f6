"""What a model is made of, seen from its linear layers: blocks, output heads, experts, tied weights.

    work of a linear layer  =  2 N K FLOPs per token and gemm; three gemms when it trains: 6 N K

Nothing here reads a weight's values or changes the model; `survey` walks the module tree once and returns one
frozen `Layer` per linear layer, which is everything that rules may look at.

Legend: N = output features, K = input features (a weight is w_NK).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from narrowgauge.compute.nn.parallel.placements import gathered_modules, shape_in_use
from narrowgauge.metrics.site import WHOLE

# Path components that wrappers insert; a layer's name does not depend on how the model was wrapped.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Names under which models keep the layer that makes logits or scores.
_HEADS = (
    "lm_head head heads output score classifier embed_out output_projection out_head output_head unembed "
    "fc_out logits predictions proj_out qa_outputs value_head"
)
HEAD_NAMES = frozenset(_HEADS.split())
# A stack with less than this share of the largest stack's weights is an accessory, not the model's depth.
_MINOR_STACK = 1 / 8

_Stack = nn.ModuleList | nn.Sequential | nn.ModuleDict


@dataclass(frozen=True)
class Layer:
    """A linear layer as rules see it; `module` is an `nn.Linear`, or something that works like one."""

    name: str  # qualified, without the wrappers of compile, checkpointing or data parallelism
    module: nn.Module
    shape: tuple[int, int]  # (N, K)
    block: int | None = None  # index of the repeated block that holds it
    blocks: int = 0  # how many repeated blocks the model has
    head: str = ""  # why it is taken for an output head; "" when it is not
    experts: int = 0  # number of experts listed beside it
    tied: tuple[str, ...] = ()  # embeddings and other modules that own the same weight
    shared_with: tuple[str, ...] = ()  # other linear layers that own the same weight
    aliases: tuple[str, ...] = ()  # further names of this very module
    gathered: bool = False  # FSDP2 makes its weight whole for each use

    @property
    def last(self) -> str:
        """The last component of its name."""
        return self.name.rpartition(".")[2]

    @property
    def weight(self) -> torch.Tensor:
        """Its weight parameter (never a computed one)."""
        weight = self.module._parameters.get("weight")
        if weight is None:
            raise AttributeError(f"{self.name} has no weight parameter")
        return weight

    @property
    def product(self) -> tuple[int, int]:
        """(N, K) of the matrix that this process multiplies: a part of it, under tensor parallelism."""
        return shape_in_use(self.weight, self.shape, gathered=self.gathered)

    @property
    def names(self) -> tuple[str, ...]:
        """All of its names."""
        return (self.name, *self.aliases)

    @property
    def flops_per_token(self) -> int:
        """Of its three gemms: 6 N K."""
        return 6 * self.shape[0] * self.shape[1]


def clean(name: str, *, wrapped: bool = False) -> str:
    """A module's name without what wrappers put into it; the root is called `WHOLE`."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if wrapped and parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts) or WHOLE


def is_wrapper(model: nn.Module) -> bool:
    """Whether the root only holds the user's model in its attribute `module`."""
    inner = getattr(model, "_orig_mod", model)
    return type(inner).__name__ in {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(N, K) of a module that multiplies by a weight matrix, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # compiled already, whatever it is: nothing in it can be exchanged
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    weight = module._parameters.get("weight")
    if type(module).__name__ == "Conv1D" and weight is not None and weight.dim() == 2:
        return weight.shape[1], weight.shape[0]  # the transposed linear layer of GPT-2 in transformers
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return module.in_proj_weight.shape[0], module.in_proj_weight.shape[1]
    return None


def survey(model: nn.Module) -> list[Layer]:
    """One `Layer` per linear layer of the model, in the order of `named_modules()`."""
    wrapped = is_wrapper(model)
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for raw, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        modules.setdefault(id(module), module)
        names.setdefault(id(module), []).append(clean(raw, wrapped=wrapped))

    block_of, blocks = _blocks(model)
    owners, experts = _owners(modules), _experts(modules.values())
    gathered = gathered_modules(modules.values())
    shapes = {key: shape for key, module in modules.items() if (shape := linear_shape(module))}
    heads = _heads(model, {names[key][0]: shape[0] for key, shape in shapes.items() if key not in block_of})
    layers = []
    for key, shape in shapes.items():
        module, (name, *aliases) = modules[key], names[key]
        others = [other for other in owners.get(_storage(module), []) if other != key]
        layers.append(
            Layer(
                name=name,
                module=module,
                shape=shape,
                block=block_of.get(key),
                blocks=blocks,
                head=heads.get(name, ""),
                experts=experts.get(key, 0),
                tied=tuple(names[o][0] for o in others if o not in shapes or names[o][0] in heads),
                shared_with=tuple(names[o][0] for o in others if o in shapes),
                aliases=tuple(aliases),
                gathered=key in gathered,
            )
        )
    return layers


def stacks(model: nn.Module) -> list[list[nn.Module]]:
    """The repeated blocks, in model order: runs of children of one class in the outermost lists.

    A list of lists of blocks (stages) counts as its inner lists; a list inside a block (experts) does not.
    """
    found: list[list[nn.Module]] = []

    def visit(module: nn.Module) -> None:
        runs = _runs(module)
        stages = runs and all(_runs(block) and isinstance(block, _Stack) for run in runs for block in run)
        found.extend([] if stages else runs)
        inside = set() if stages else {id(block) for run in runs for block in run}
        for child in module.children():
            if id(child) not in inside:
                visit(child)

    visit(model)
    weights = [sum(_linear_weights(block) for block in run) for run in found]
    floor = max(1, max(weights, default=0) * _MINOR_STACK)
    return [run for run, weight in zip(found, weights, strict=True) if weight >= floor]


def _runs(module: nn.Module) -> list[list[nn.Module]]:
    """Runs of two or more neighbours of one class in a list; bare linears only when they are all there is."""
    if not isinstance(module, _Stack):
        return []
    children = list(module.children())
    runs = [list(run) for _, run in groupby(children, key=type)]
    return [run for run in runs if len(run) > 1 and (any(True for _ in run[0].children()) or len(runs) == 1)]


def _linear_weights(module: nn.Module) -> int:
    shapes = (linear_shape(m) for m in module.modules())
    return sum(shape[0] * shape[1] for shape in shapes if shape)


def _blocks(model: nn.Module) -> tuple[dict[int, int], int]:
    """Which repeated block every module lies in, and how many blocks there are (all stacks in a row)."""
    inside: dict[int, int] = {}
    count = 0
    for run in stacks(model):
        for block in run:
            for module in block.modules():
                inside.setdefault(id(module), count)
            count += 1
    return inside, count


def _storage(module: nn.Module) -> object:
    """What modules that own the same weight have in common (also after `a.weight.data = b.weight.data`)."""
    weight = module._parameters.get("weight")
    if weight is None:
        return ("none", id(module))
    if weight.device.type == "meta" or type(weight) not in (nn.Parameter, torch.Tensor) or not weight.numel():
        return ("object", id(weight))
    return ("memory", weight.device, weight.data_ptr())


def _owners(modules: dict[int, nn.Module]) -> dict[object, list[int]]:
    owners: dict[object, list[int]] = {}
    for key, module in modules.items():
        if module._parameters.get("weight") is not None:
            owners.setdefault(_storage(module), []).append(key)
    return owners


def _heads(model: nn.Module, outside: dict[str, int]) -> dict[str, str]:
    """Output heads among the linear layers outside all blocks (name -> N), each with the reason why."""
    heads = {
        name: f"output head: its name says so ({part!r})"
        for name in outside
        for part in name.split(".")
        if part in HEAD_NAMES
    }
    rows = {e.num_embeddings for e in model.modules() if isinstance(e, nn.Embedding | nn.EmbeddingBag)}
    logits = [name for name, n in outside.items() if n in rows]
    if logits:
        name = logits[-1]
        heads.setdefault(name, f"output head: as many outputs as an embedding has rows ({outside[name]})")
    return heads


def _experts(modules: Iterable[nn.Module]) -> dict[int, int]:
    """How many experts are listed beside a module (a router has as many outputs)."""
    beside: dict[int, int] = {}
    for parent in modules:
        children = dict(parent.named_children())
        lists = [len(c) for name, c in children.items() if "expert" in name and isinstance(c, _Stack)]
        if lists:
            beside.update({id(child): max(lists) for child in children.values()})
    return beside
