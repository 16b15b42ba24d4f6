"""A model, its batches and recipes, for ranks and for the process that computes the same in one piece."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED

STEPS = 4
RECIPES = {
    "current": CURRENT,
    "delayed": DELAYED.with_(initial="one", history=2),  # the first scale is nobody's own
    "blockwise": BLOCKWISE,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.again = False

    def inside(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(32, 32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(step, who, microbatch=0):
    generator = torch.Generator().manual_seed(100 * step + 10 * who + microbatch)
    return torch.randn(8, 32, generator=generator) * (1 + who) * (1 + step)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# Of these layers FP8 rounds the numbers, but scales are powers of two: every sum of their products is exact in float32.
LAYERS = {  # N, K, recipe; a block of 128 is as long as a part
    "delayed": ((32, 64), RECIPES["delayed"].with_(power_of_two=True)),
    "blockwise": ((256, 256), BLOCKWISE),
    "current": ((64, 64), CURRENT),  # not so this one
}
CASES = [("delayed", style) for style in ("columns", "rows", "columns of parts", "rows to parts")]
CASES += [(name, style) for name in ("blockwise", "current") for style in ("columns", "rows")]


def _integers(shape, seed):
    return torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(seed)).float()


def layer(name):
    """One layer."""
    (out, width), _ = LAYERS[name]
    made = nn.Linear(width, out)
    with torch.no_grad():
        made.weight.copy_(_integers(made.weight.shape, 1))
        made.bias.copy_(_integers(made.bias.shape, 2))
    return made


def data(name, step):
    """Its input and the gradient of its output, in a step."""
    (out, width), _ = LAYERS[name]
    return _integers((16, width), 10 + step) * 2.0**step, _integers((16, out), 20 + step) * 2.0**step


def in_one_piece(model, steps, micro=1):
    """Both ranks' batches, one after the other: their losses, the mean gradients, and what the model became."""
    optimizer = optimizer_of(model)
    losses, grads = [[], []], []
    for step in steps:
        sums = []
        for who in range(2):
            for i in range(micro):
                loss = model(batch(step, who, i)).square().mean()
                loss.backward()
                losses[who].append(loss.item())
            sums.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for p, *mine in zip(model.parameters(), *sums, strict=True):
            p.grad = (mine[0] + mine[1]) / 2
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {name: p.detach() for name, p in model.named_parameters()}, ng.scaling_state(model)
