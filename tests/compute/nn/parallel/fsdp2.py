"""Every rank trains Model, sharded by FSDP2 before or after its conversion, and saves what came of it."""

import torch
import torch.distributed as dist
from tests.compute.nn.parallel.model import RECIPES, STEPS, Model, batch, optimizer_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowgauge as ng

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))


def sharded(model, **options):
    """On single layers, on blocks, and on the rest."""
    for module in (model.last, *model.blocks, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def made(recipe, first, **options):
    model = Model()
    if first == "convert":
        return sharded(ng.convert(model, RECIPES[recipe])[0], **options)
    return ng.convert(sharded(model, **options), RECIPES[recipe])[0]


def whole(x):
    return x.full_tensor().detach().clone()


def train(model, optimizer, steps, micro=1):
    losses, grads = [], []
    for step in steps:
        for i in range(micro):
            model.set_requires_gradient_sync(i == micro - 1)
            loss = model(batch(step, rank, i)).square().mean()
            loss.backward()
            losses.append(loss.item())
        grads.append({name: whole(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "grads": grads,
        "weights": {name: whole(p) for name, p in model.named_parameters()},
        "state": ng.scaling_state(model),
    }


found = {}
for recipe in RECIPES:
    for first in ("convert", "shard"):
        model = made(recipe, first)
        found[recipe, first] = train(model, optimizer_of(model), range(STEPS))
        found[recipe, first]["class"] = type(model.last).__name__
        found[recipe, first]["keys"] = list(model.state_dict())

# Microbatches, and blocks that are recomputed in the backward pass.
model = made("delayed", "shard")
for block in model.blocks:
    block.again = True
found["micro"] = train(model, optimizer_of(model), range(STEPS), micro=2)
found["kept"] = [module._fp8.kept_weight._made is None for module in model.modules() if hasattr(module, "_fp8")]

# What autograd keeps from forward to backward: codes of inputs, and nothing of the size of a weight but FSDP2's own.
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append((x.dtype, tuple(x.shape))) or x, lambda x: x):
    loss = made("current", "shard")(batch(0, rank)).sum()
found["saved"] = [shape for dtype, shape in saved if dtype.itemsize == 1]

# Interrupted in the middle, and gone on with what state_dict kept.
model = made("delayed", "convert")
optimizer = optimizer_of(model)
train(model, optimizer, range(2))
kept, moments = model.state_dict(), optimizer.state_dict()
model = made("delayed", "shard")
model.load_state_dict(kept)
optimizer = optimizer_of(model)
optimizer.load_state_dict(moments)
found["resumed"] = train(model, optimizer, range(2, STEPS))

# In BF16, parameters float32.
model = made("current", "shard", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
found["bf16"] = train(model, optimizer_of(model), range(1))

# One layer in high precision, and back to plain layers.
model = ng.convert(sharded(Model()), "current", high=[{"sites": ["last"], "gemms": ["wgrad"]}])[0]
found["switched"] = train(model, optimizer_of(model), range(STEPS))
ng.revert(model)
found["reverted"] = type(model.last).__name__, type(model.last) is type(sharded(Model()).last), type(model.blocks[0].up)
found["reverted"] = [str(kind) for kind in found["reverted"]]
found["after"] = train(model, optimizer_of(model), range(1))["losses"]

torch.save(found, f"rank{rank}.pt")
dist.destroy_process_group()
