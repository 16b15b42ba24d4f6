"""Two ranks train Model under DDP, converted before or after, and save what came of it."""

import contextlib
import warnings

import torch
import torch.distributed as dist
from tests.compute.nn.parallel.model import RECIPES, STEPS, Model, batch, optimizer_of
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng

dist.init_process_group("gloo")
rank = dist.get_rank()
asked = []
all_reduce = dist.all_reduce


def counted(x, *args, **kwargs):
    asked.append(tuple(x.shape))
    return all_reduce(x, *args, **kwargs)


dist.all_reduce = counted  # DDP's own do not come by here


def train(ddp, steps=STEPS, micro=1):
    asked.clear()
    model, optimizer, losses = getattr(ddp, "module", ddp), optimizer_of(ddp), []
    for step in range(steps):
        for i in range(micro):
            with ddp.no_sync() if i < micro - 1 else contextlib.nullcontext():
                loss = ddp(batch(step, rank, i)).square().mean()
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    model = getattr(model, "_orig_mod", model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "state": ng.scaling_state(model), "asked": list(asked)}


def converted(model, **options):
    return ng.convert(model, RECIPES["delayed"], **options)[0]


found = {"before": train(DistributedDataParallel(converted(Model())))}
found["after"] = train(converted(DistributedDataParallel(Model())))
found["own"] = train(DistributedDataParallel(converted(Model(), reduce_amax=False)))

model = converted(Model())
for block in model.blocks:
    block.again = True
found["micro"] = train(DistributedDataParallel(model), micro=2)
found["compiled"] = train(DistributedDataParallel(torch.compile(converted(Model()), backend="aot_eager")))

# Data parallel by hand: nothing says who the ranks are, but the program.
model = converted(Model(), reduce_amax=dist.group.WORLD)
for p in model.parameters():
    p.register_hook(lambda grad: all_reduce(grad.div_(2)) or grad)
found["given"] = train(model)

# A rank that has fewer batches than the other, and one that goes on alone: nobody is asked who does not step as well.
ddp = DistributedDataParallel(converted(Model()))
with warnings.catch_warnings(record=True) as said, ddp.join():
    warnings.simplefilter("always")
    found["joined"] = train(ddp, steps=1 + rank)
found["said"] = [str(each.message) for each in said]
if rank == 0:
    found["alone"] = train(ddp.module, steps=2)
dist.barrier()
torch.save(found, f"rank{rank}.pt")
dist.destroy_process_group()
