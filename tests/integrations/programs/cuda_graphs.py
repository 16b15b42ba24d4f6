"""A small model whose steps are CUDA graphs, as $HOW says; by hand it writes down what its layers multiplied.

    captured    three steps on a stream beside, then a whole one in a graph, which is replayed
    graphed     its middle by `make_graphed_callables`
    compiled    all of it by `torch.compile(mode="reduce-overhead")`

Nobody can look into a graph, and torch refuses hooks in one. So what a step multiplied is made once more behind it,
from its input, copies of its weights, and the gradient of its result. A CPU has no graphs: there the same steps are
eager, or compiled by aot_eager.
"""

import json
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from by_hand_sums import Sums
from text import place
from torch import nn


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


how, device, every = os.environ["HOW"], place(), int(os.environ["EVERY"])
on_gpu = device.type == "cuda"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(48, 64), Middle(), nn.Linear(64, 32)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, target = torch.zeros(24, 48, device=device), torch.zeros(24, 32, device=device)
kept, rows, losses, scalars = {}, [], {}, {}


def train(call):
    optimizer.zero_grad(set_to_none=how != "captured")  # a graph adds to the gradients that were there when it was made
    y = call(x)
    if not (on_gpu and torch.cuda.is_current_stream_capturing()):
        y.register_hook(lambda dy: kept.update(dy=dy.clone()))
    loss = (y - target).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=True)
    optimizer.step()
    return loss, norm


def length(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


@torch.no_grad()
def step(run, *args):
    number = len(losses) + 1
    data = torch.Generator().manual_seed(number)
    x.copy_(torch.randn(24, 48, generator=data))
    target.copy_(torch.randn(24, 32, generator=data))
    kept.clear()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.enable_grad():
        loss, norm = run(*args)
    if on_gpu:
        torch.cuda.synchronize()
    losses[number] = loss.item()
    moved = length(p - before[name] for name, p in model.named_parameters()) / length(before.values())
    scalars[number] = {
        "lr": 0.1,
        "grad_norm": norm.item(),
        "param_norm": length(before.values()),
        "update_ratio": moved,
    }
    if kept and number % every == 0:
        rows.extend(products(number, before, kept["dy"]))


def products(number, was, dy):
    """What the layers multiplied."""
    names = ("0", "1.first", "1.last", "2")
    inputs, weights, gradients = [x], [was[f"{name}.weight"] for name in names], [dy]
    for name, weight in zip(names[:-1], weights, strict=False):
        made = F.linear(inputs[-1], weight, was[f"{name}.bias"])
        inputs.append(torch.relu(made) if name == "1.first" else made)
    for i in (3, 2, 1):
        made = gradients[0] @ weights[i]
        gradients.insert(0, made * (inputs[i] > 0) if names[i] == "1.last" else made)
    for i, name in enumerate(names):
        for role, operand in (("input", inputs[i]), ("weight", weights[i]), ("grad_output", gradients[i])):
            sums = Sums(number // every - 1)
            sums.add(operand, torch.float8_e5m2 if role == "grad_output" else torch.float8_e4m3fn)
            yield {"step": number, "site": f"{name}:{role}", **sums.row()}


if how == "captured" and on_gpu:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(train, model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = train(model)

    def replay():
        graph.replay()
        return made

    for _ in range(5):
        step(replay)
else:
    call = model
    if how == "graphed" and on_gpu:
        torch.cuda.make_graphed_callables(model[1], (torch.zeros(24, 64, device=device, requires_grad=True),))
    if how == "compiled":
        call = torch.compile(model, **({"mode": "reduce-overhead"} if on_gpu else {"backend": "aot_eager"}))
    for _ in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        step(train, call)
folder = Path("hand")
folder.mkdir()
(folder / "rank0.json").write_text(json.dumps({"rows": {"current": rows}, "losses": losses, "scalars": scalars}))
Path("said.json").write_text(json.dumps(list(losses.values())))
