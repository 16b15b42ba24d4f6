"""Whether all ranks of a program train the model that this one has, or others may have other parts of it.

Of a model that may be a part, ranks that have the same one agree on a word for it: Megatron-Core's stage, or the lowest
of the ranks that a wrapper or a mesh unites, or else the weights that the model began with.

a wrapper (DDP, FSDP1), or the weights' mesh, or both    all, if that is for as many ranks as there are
an engine of DeepSpeed, Megatron-Core                    all, but for pipelines
nothing of it                                            nobody knows: it may be a stage that was made by hand
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from narrowgauge.session.tensors.fingerprint import weights_hash, weights_of
from narrowgauge.session.tensors.sharded import is_distributed, mesh_size, wrapped_over
from narrowgauge.session.tensors.shares import PLACE, stage_here

ENGINES = ("deepspeed.runtime.engine", "DeepSpeedEngine"), ("deepspeed.runtime.pipe.engine", "PipelineEngine")


def held_by_all(root: nn.Module, whole: nn.Module) -> bool:
    """Whether every rank has the model `whole`, or a share of each of its layers; `root` is what the program calls."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world < 2:
        return True
    if PLACE in sys.modules:
        return stage_here() is None
    modules = (root, *whole.modules())
    engine, pipeline = (getattr(sys.modules.get(where), name, ()) for where, name in ENGINES)
    if any(isinstance(module, engine) and not isinstance(module, pipeline) for module in modules):
        return True
    mesh = max((mesh_size(p) for p in whole.parameters()), default=1)
    return mesh * max(len(wrapped_over(modules)), 1) >= world


def part_of(root: nn.Module, whole: nn.Module) -> str:
    """A word for the part of a larger model that `whole` may be, equal on the ranks that have it; "" if it is none."""
    if held_by_all(root, whole):
        return ""
    if (stage := stage_here()) is not None:
        return f"stage {stage}"
    united = wrapped_over((root, *whole.modules()))
    if not united and (meshes := _meshes(whole)):
        united = max(meshes, key=lambda mesh: mesh.size()).mesh.flatten().tolist()
    return f"rank {min(united)}" if len(united) > 1 else weights_hash(weights_of(whole))


def _meshes(whole: nn.Module) -> list[Any]:
    return [p.device_mesh for p in whole.parameters() if is_distributed(p)]  # type: ignore[attr-defined]
