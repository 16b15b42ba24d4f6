"""A program that compiled something before it is watched: trained alone, then watched, then by hand without graphs.

    python compiled_before.py CASE FOLDER

Leaves FOLDER/run, the operands by hand in FOLDER/hand.pt, and says what dynamo counted while it trained.
"""

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng

STEPS, EVERY = 8, 2
SIZES = (24, 24, 40, 40, 24, 56, 24, 24)  # of batches; step 6, which is recorded, is the first of its size


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks, between them a function of its own, and a head that is nobody's layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Parameter(torch.randn(16, 32) / 6)
        self.act, self.part = torch.tanh, self.middle

    def middle(self, x):
        return self.second(x)

    def forward(self, x):
        return F.linear(self.part(self.act(self.first(x))), self.head)


class Own(torch.optim.Optimizer):
    """One whose step goes into a graph as a whole."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


class Backend:
    """Counts how often its graphs run."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def square(y):
    return y.square().mean()


class Program:
    """What it calls for an output, a loss and an update; `case` says what of it is compiled, and when."""

    def __init__(self, case, net):
        self.net, self.optimizer = net, (Own if "own" in case else torch.optim.SGD)(net.parameters(), lr=0.1)
        self.run, self.loss, self.step = net, square, self.optimizer.step
        self.kept, self.case = Backend(), case  # what must stay compiled

    def before(self):
        """Compile what is compiled before the watch."""
        kept = {"backend": self.kept, "dynamic": False}
        case, net = self.case, self.net
        if case == "another function":
            torch.compile(lambda x: 2 * x + 1, **kept)(torch.ones(3))
        elif case == "another model":
            self.other = torch.compile(Block(), **kept)
            self.other(torch.ones(3, 32))
        elif case.startswith("activation"):
            net.act = torch.compile(lambda x: x.tanh(), **kept)
        elif case.startswith("loss"):
            self.loss = torch.compile(square, **kept)
        elif case == "step":
            self.step = torch.compile(self.optimizer.step, **kept)
        elif case == "model":
            self.run = torch.compile(net, **kept)
        elif case == "model in place":
            net.compile(**kept)
        elif case == "block in place":
            net.second.compile(**kept)
        elif case == "block":
            net.second = torch.compile(net.second, **kept)
        elif case == "part":
            net.part = torch.compile(net.middle, **kept)
        elif case == "forward":
            net.forward = torch.compile(net.forward, **kept)
        elif case == "function":
            self.run = torch.compile(lambda x: net(x), **kept)
        elif case.startswith("own update"):
            self.step = torch.compile(lambda: self.optimizer.step(), fullgraph=True, **kept)

    def after(self):
        """What is compiled in it."""
        options = {"backend": "aot_eager", "dynamic": False}
        if self.case.endswith("and model in the watch"):
            self.run = torch.compile(self.net, **options)
        elif self.case == "model in the watch":
            torch.compile(lambda x: 2 * x + 1, **options)(torch.ones(3))
            self.run = torch.compile(self.net, **options)

    def train(self, sizes, then=lambda step: None):
        losses = []
        for number, size in enumerate(sizes, 1):
            x = torch.randn(size, 32, generator=torch.Generator().manual_seed(number))
            loss = self.loss(self.run(x))
            loss.backward()
            losses.append(loss.item())
            then(number)
            self.step()
            self.optimizer.zero_grad()
        return losses


def counted():
    found = torch._dynamo.utils.counters
    return {
        "graphs": found["stats"]["unique_graphs"],
        "frames": found["frames"]["total"],
        "breaks": sum(found["graph_break"].values()),
    }


def execution(case, net, around):
    """Its losses, what was compiled while it trained, and how often what must stay compiled ran."""
    torch._dynamo.reset()
    program = Program(case, net)
    program.before()
    program.train(SIZES[:2])
    before, program.kept.runs = counted(), 0
    with around:
        program.after()
        losses = program.train(SIZES)
    found = {name: number - before[name] for name, number in counted().items()}
    return {"losses": losses, "runs": program.kept.runs, **found}


def by_hand(net):
    """The operands of recorded steps, without graphs."""
    program, operands, seen = Program("none", net), {}, []

    def keep(site, module, x, y):
        y.retain_grad()
        seen.append((site, x, module if isinstance(module, nn.Parameter) else module.weight, y))

    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, x, y, name=name: keep(name, module, x[0], y))

    def part(x):
        net.x = net.second(x)
        return net.x

    def run(x):
        y = net(x)
        keep("head", net.head, net.x, y)
        return y

    def then(step):
        if step % EVERY == 0:
            for site, *tensors, y in seen:
                for role, x in zip(("input", "weight", "grad_output"), (*tensors, y.grad), strict=True):
                    operands[step, f"{site}:{role}"] = x.detach().clone()
        seen.clear()

    net.part, program.run = part, run
    program.train(SIZES[:2])
    program.train(SIZES, then)
    return operands


def main(case, folder):
    torch.manual_seed(0)
    net, folder = Net(), Path(folder)
    alone = execution(case, copy.deepcopy(net), nullcontext())
    watched = copy.deepcopy(net)
    seen = execution(case, watched, Watch(folder / "run"))
    torch.save(by_hand(copy.deepcopy(net)), folder / "hand.pt")
    print(json.dumps({"alone": alone, "watched": seen}))


class Watch:
    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        self.watching = ng.watch(out=self.folder, every=EVERY)

    def __exit__(self, *error):
        self.watching.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
