"""DeepSpeed, spread over two ranks: experts, two on each rank, then its pipeline engines.

In FP16 the first batch's loss is far too large: its step is skipped.
"""

import json
import os
from itertools import chain, repeat
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_fp32_param
from text import leave, pieces, place
from torch import nn

# Its own collectives for CPUs are C++, compiled for minutes as a program first starts. These are those of gloo.
deepspeed.ops.__compatible_ops__ = {}

ENGINES = {"float32": 0, "clipped": 0, "fp16": 1}  # by its stage of ZeRO
MICROBATCHES, STEPS = 4, 3


def config(name):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.0 if name == "float32" else 0.05,
        "zero_optimization": {"stage": ENGINES[name]},
        "fp16": {"enabled": name == "fp16", "initial_scale_power": 10, "loss_scale_window": 1, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }


class Model(nn.Module):
    """Four experts, two on each rank, which sends the others' tokens to them."""

    def __init__(self):
        super().__init__()
        expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.moe = MoE(16, expert, num_experts=4, ep_size=2, capacity_factor=4.0)

    def forward(self, x):
        return self.moe(x)[0]


def experts():
    torch.manual_seed(rank)
    model = Model().to(device)
    model.moe.set_deepspeed_parallelism()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(2, 16, 16).to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append({"engine": None, "loss": loss.item()})
    return model


def stages(name):
    """A model in two stages; what its engine says, and what each rank has of gradients and weights."""
    torch.manual_seed(0)
    times = chain(repeat(2.0**30 if name == "fp16" else 1.0, MICROBATCHES), repeat(1.0))

    def loss_of(logits, tokens):
        return F.cross_entropy(logits.reshape(-1, 128).float(), tokens.reshape(-1)) * next(times)

    layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128)]
    model = PipelineModule([nn.Embedding(128, 32), *layers], num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(name))
    gradients = [summed(p) for p in model.parameters()]
    batches = iter([(t[:, :-1], t[:, 1:]) for t in pieces(count=4 * MICROBATCHES * STEPS).to(device).split(4)])
    for _ in range(STEPS):
        before, scale, skipped = weights(model), engine._get_optimizer_loss_scale(), engine.skipped_steps
        loss = engine.train_batch(batches).item()
        moved = [new - old for new, old in zip(weights(model), before, strict=True)]
        norm = engine.get_global_grad_norm()
        said.append(
            {
                "engine": name,
                "loss": loss,
                "scale": scale if name == "fp16" else None,
                "skipped": engine.skipped_steps > skipped,
                "norm": None if norm is None else float(norm),
                "gradients": of_ranks(gradients),
                "weights": of_ranks(before),
                "moved": of_ranks(moved),
            }
        )
        for whole in gradients:
            whole.zero_()
    return engine


def summed(p):
    """Its gradient, to which each microbatch adds."""
    whole = torch.zeros(p.shape, dtype=torch.float64, device=p.device)

    def add(gradient):
        whole.add_(gradient)

    p.register_hook(add)
    return whole


def weights(model):
    """Those that the optimizer has."""
    found = [safe_get_full_fp32_param(p) for p in model.parameters()]
    return [(p if w is None else w).detach().double() for p, w in zip(model.parameters(), found, strict=True)]


def of_ranks(tensors):
    """Each rank's length of all its tensors; None of what is not finite."""
    mine = sum(x.square().sum() for x in tensors).sqrt()
    each = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(each, mine)
    return [x.item() if x.isfinite() else None for x in each]


def name_in_whole(name):
    """What a rank's layer is called in the whole model."""
    before, found, after = name.partition("deepspeed_experts.")
    number, dot, rest = after.partition(".")
    return f"{before}{found}{int(number) + 2 * rank}{dot}{rest}" if found else name


device = place()
deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
if device.type == "cpu":  # refused where its instructions are missing, for speed; torch multiplies without them
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
rank = dist.get_rank()
said = []
models = [experts()]  # of all ranks as long as there is no pipeline
engines = [stages(name) for name in os.environ.get("ENGINES", " ".join(ENGINES)).split()]
models += [engine.module for engine in engines]
if rank == 0:
    Path("said.json").write_text(json.dumps(said))
leave()
