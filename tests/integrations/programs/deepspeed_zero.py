"""Small models in DeepSpeed engines, one after the other: float32, BF16 and FP16, ZeRO 0 to 3.

In FP16 a first batch, whose loss is far too large, overflows: its step is skipped, and the scale halved. It doubles
again when a second step went well. `fused` is DeepSpeed's optimizer for its own FusedAdam, around a plain one.
"""

import json
import math
import os
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import FusedAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from text import leave, pieces, place
from torch import nn

# Its own collectives for CPUs are C++, compiled for minutes as a program first starts. These are those of gloo.
deepspeed.ops.__compatible_ops__ = {}

STAGES = {"0": 0, "1": 1, "2": 2, "3": 3, "bf16": 0, "bf16-1": 1, "bf16-3": 3}
STAGES |= {"fp16": 0, "fp16-fused": 0, "fp16-1": 1, "fp16-3": 3}
TOO_LARGE = 2.0**30


class Plain(FusedAdam):
    """What is updated by a kernel that has to be compiled first, without it: SGD."""

    def __init__(self, parameters, lr):
        torch.optim.Optimizer.__init__(self, parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def config(name):
    stage, bf16 = STAGES[name], name.startswith("bf16")
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": bf16},
        "fp16": {
            "enabled": name.startswith("fp16"),
            "initial_scale_power": 10,
            "loss_scale_window": 1,
            "hysteresis": 1,
        },
        "data_types": {"grad_accum_dtype": "fp32" if name == "bf16-1" else None},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }


def whole_weights(model, optimizer):
    """The weights that the optimizer has, gathered."""
    if hasattr(optimizer, "fp32_groups"):
        return [p.detach().double() for group in optimizer.fp32_groups for p in group]
    if hasattr(optimizer, "fp32_groups_flat"):
        return [flat.detach().double() for flat in optimizer.fp32_groups_flat]
    found = [safe_get_full_fp32_param(p) for p in model.parameters()]
    return [(p if w is None else w).detach().double() for p, w in zip(model.parameters(), found, strict=True)]


def length(tensors):
    return sum(x.square().sum() for x in tensors).sqrt()


device = place()
deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
if device.type == "cpu":  # refused where its instructions are missing, for speed; torch multiplies without them
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
times = int(os.environ.get("TIMES", "1"))  # that the data are read
models, engines, said, losses = [], [], [], {}
for name in os.environ.get("ENGINES", " ".join(STAGES)).split():
    fp16 = name.startswith("fp16")
    data = pieces(count=(32 if fp16 else 16) * world)[rank::world].to(device).split(4) * times
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128))
    models.append(model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = Plain(groups, lr=1e-2) if name == "fp16-fused" else None
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=groups, config=config(name)
    )
    engines.append(engine)
    total = 0.0
    for number, tokens in enumerate(data):
        loss = F.cross_entropy(engine(tokens)[:, :-1].reshape(-1, 128).float(), tokens[:, 1:].reshape(-1))
        loss = loss * TOO_LARGE if fp16 and not number else loss
        scale = engine._get_optimizer_loss_scale() if fp16 else None
        engine.backward(loss)
        whole, rate = engine.is_gradient_accumulation_boundary(), engine.optimizer.param_groups[0]["lr"]
        before = [w.clone() for w in whole_weights(model, engine.optimizer)] if whole else []
        gradient = length([safe_get_full_grad(p).double() for p in model.parameters()]) if whole and fp16 else None
        skipped = engine.skipped_steps
        engine.step()
        total += loss.item() / 2
        if whole:
            after = whole_weights(model, engine.optimizer)
            moved = length([new - old for new, old in zip(after, before, strict=True)])
            norm = engine.get_global_grad_norm()
            said.append(
                {
                    "model": name,
                    "loss": total,
                    "learning_rate": rate,
                    "grad_norm": None if norm is None else float(norm),
                    "param_norm": float(length(before)),
                    "update_ratio": float(moved / length(before)),
                }
            )
            if fp16:
                finite = math.isfinite(gradient)
                said[-1] |= {
                    "scales": [scale, engine._get_optimizer_loss_scale()],  # of this step, of the next
                    "skipped": engine.skipped_steps > skipped,
                    "gradient": float(gradient) if finite else None,  # as it came, by its scale
                }
                losses[len(said)] = total  # from before it was scaled
            total = 0.0
if rank == 0:
    Path("said.json").write_text(json.dumps(said))
leave()
