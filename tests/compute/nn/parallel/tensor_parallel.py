"""Four ranks, 2 x 2: layers cut along the second dimension, alone and inside of FSDP2; each saves what came of it."""

import torch
import torch.distributed as dist
from tests.compute.nn.parallel.model import CASES, LAYERS, RECIPES, STEPS, Model, batch, data, layer, optimizer_of
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.compute.nn import set_observer

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
tp = mesh["tp"]
STYLES = {  # by how x and y lie outside of the layer
    "columns": ColwiseParallel(output_layouts=Replicate()),
    "rows": RowwiseParallel(input_layouts=Replicate()),
    "columns of parts": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    "rows to parts": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
}


def whole(x):
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.detach().clone()


def cut(x, style, which):
    """What this rank hands over of an input or a gradient, which is all of it unless the style says otherwise."""
    return x.chunk(2)[tp.get_local_rank()] if style == which else x


def joined(x, style, which):
    return DTensor.from_local(x, tp, [Shard(0)]).full_tensor() if style == which else x


class Unwatched:
    """An observer that wants nothing, but is there."""

    def wants(self, module):
        return False


def cut_and_converted(name, plan, recipe):
    """In either order."""
    model = nn.Sequential(layer(name))
    if name == "delayed":
        ng.convert(model, recipe)
    parallelize_module(model, tp, {"0": plan})
    if name != "delayed":
        ng.convert(model, recipe)
    return model


found = {}
for name, style in CASES:
    model = cut_and_converted(name, STYLES[style], LAYERS[name][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    results = []
    for step in range(3):
        x, dy = data(name, step)
        x = cut(x, style, "columns of parts").requires_grad_()
        y = model(x)
        y.backward(cut(dy, style, "rows to parts"))
        grads = [whole(p.grad) for p in model.parameters()]
        results += [joined(y.detach(), style, "rows to parts"), joined(x.grad, style, "columns of parts"), *grads]
        optimizer.step()
        optimizer.zero_grad()
    found[name, style] = [whole(x) for x in results], ng.scaling_state(model)


def trained(first, *, spread=None, over="dp"):
    model = Model()
    if first == "convert":
        ng.convert(model, RECIPES["delayed"])
    for block in model.blocks if over == "dp" else ():
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if spread is DistributedDataParallel:
        _pre_dp_module_transform(model)
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    elif spread:
        for part in (*model.blocks, model):
            spread(part, mesh=mesh[over])
    if first != "convert":
        ng.convert(model, RECIPES["delayed"])
    set_observer(model, Unwatched())
    optimizer, losses, who = optimizer_of(model), [], mesh["dp"].get_local_rank() if spread else 0
    for step in range(STEPS):
        loss = model(batch(step, who)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    copies = {name: m._fp8.copies for name, m in model.named_modules() if hasattr(m, "_fp8")}
    return losses, {name: whole(p) for name, p in model.named_parameters()}, ng.scaling_state(model), copies


found["cut"] = trained("convert")
found["cut and sharded"] = trained("convert", spread=fully_shard)
found["sharded, then converted"] = trained("cut", spread=fully_shard)
found["cut and replicated"] = trained("cut", spread=replicate)
found["cut and copied"] = trained("cut", spread=DistributedDataParallel)
found["hybrid"] = trained("convert", spread=fully_shard, over=("dp", "tp"))  # copies along dp, shards along tp
torch.save(found, f"rank{rank}.pt")
dist.destroy_process_group()
