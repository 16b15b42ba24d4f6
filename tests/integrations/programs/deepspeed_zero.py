"""Small models in DeepSpeed engines, one after the other: float32 and BF16, ZeRO 0 to 3."""

import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param
from text import pieces, place
from torch import nn

# Its own collectives for CPUs are C++, compiled for minutes as a program first starts. These are those of gloo.
deepspeed.ops.__compatible_ops__ = {}

STAGES = {"0": 0, "1": 1, "2": 2, "3": 3, "bf16": 0, "bf16-1": 1, "bf16-3": 3}


def config(name):
    stage, bf16 = STAGES[name], name.startswith("bf16")
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32" if name == "bf16-1" else None},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }


def whole_weights(model):
    """The weights that the optimizer has, gathered."""
    found = [safe_get_full_fp32_param(p) for p in model.parameters()]
    return [(p if w is None else w).detach().double() for p, w in zip(model.parameters(), found, strict=True)]


def length(tensors):
    return sum(x.square().sum() for x in tensors).sqrt()


device = place()
deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
data = pieces(count=16 * world)[rank::world].to(device).split(4)
models, engines, said = [], [], []
for name in os.environ.get("STAGES", " ".join(STAGES)).split():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128))
    models.append(model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config(name))
    engines.append(engine)
    total = 0.0
    for tokens in data:
        loss = F.cross_entropy(engine(tokens)[:, :-1].reshape(-1, 128).float(), tokens[:, 1:].reshape(-1))
        engine.backward(loss)
        whole, rate = engine.is_gradient_accumulation_boundary(), engine.optimizer.param_groups[0]["lr"]
        before = [w.clone() for w in whole_weights(model)] if whole else []
        engine.step()
        total += loss.item() / 2
        if whole:
            moved = length([new - old for new, old in zip(whole_weights(model), before, strict=True)])
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
            total = 0.0
if rank == 0:
    Path("said.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
