"""Layers of TransformerEngine's that train side by side, for `gpu_check_te_switches`; knows nothing of narrowgauge.

A layer is called RECIPE.KIND_CASE. Layers of a kind, and of kinds whose names are equally long, have the same weight
and get the same input and the same gradient of their output; only their names tell them apart, which is what a file of
settings can speak of. Nothing learns: the optimizer's rate is 0. What each made in each step is saved, and what BF16
products of the tensors, or of what their codes stand for, would be; an error of a layer is saved as words.

    python gpu_te_switched_program.py FOLDER
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes

STEPS, ROWS, WIDTH = 4, 512, 256
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
RECIPES: dict[str, Any] = {
    "delayed": recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    "current": recipes.Float8CurrentScaling(),
    "blockwise": recipes.Float8BlockScaling(),
    "none": None,
}


class Pair(nn.Module):
    """What `LayerNormLinear` does, by two layers: the linear one is given the normed input rounded to BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = te.LayerNorm(WIDTH, **BF16), te.Linear(WIDTH, 2 * WIDTH, bias=False, **BF16)

    def forward(self, x: Tensor) -> Tensor:
        """[ROWS, WIDTH] -> [ROWS, 2 WIDTH]."""
        return self.linear(self.norm(x))


KINDS: dict[str, Any] = {
    "linear": partial(te.Linear, WIDTH, 2 * WIDTH, bias=False, **BF16),
    "bias": partial(te.Linear, WIDTH, 2 * WIDTH, **BF16),
    "norm": partial(te.LayerNormLinear, WIDTH, 2 * WIDTH, bias=False, **BF16),
    "pair": Pair,
    "mlp": partial(te.LayerNormMLP, WIDTH, 2 * WIDTH, bias=False, **BF16),
    "experts": partial(te.GroupedLinear, 2, WIDTH, 2 * WIDTH, bias=False, **BF16),
}
KINDS["kept"] = KINDS["again"] = KINDS["compiled"] = KINDS["linear"]
CASES = {  # in the order of their calls: the first is high, so that another layer is the first in FP8
    "linear": ("whole", "plain", "fprop", "dgrad", "wgrad", "backward", "operand", "codes"),
    "bias": ("whole", "plain", "wgrad"),
    "norm": ("whole", "plain", "fprop", "dgrad", "wgrad", "backward"),
    "pair": ("plain",),
    "mlp": ("whole", "plain"),
    "experts": ("whole", "plain", "fprop", "dgrad", "wgrad", "codes"),
    "kept": ("whole", "plain", "fprop", "dgrad", "codes"),  # its FP8 weight, for a second microbatch
    "again": ("whole", "plain", "fprop", "wgrad"),  # recomputed in the backward
    "compiled": ("whole", "plain", "wgrad"),
}


def names(recipe: str) -> Iterator[tuple[str, str]]:
    """The kind and the case of every layer under a recipe."""
    for kind, cases in CASES.items():
        if kind == "compiled" and recipe not in ("current", "none"):  # delayed scaling is not for compiled programs
            continue
        for case in ("plain",) if recipe == "none" else cases:
            yield kind, case


def drawn(kind: str, step: int, what: str) -> Tensor:
    """The same for all layers of a kind: the input, or the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * step + len(kind) + (500 if what == "dy" else 0))
    width = WIDTH if what == "x" or kind == "mlp" else 2 * WIDTH
    drawn = torch.randn(ROWS, width, device="cuda", generator=generator) * (1 + step) / (1 if what == "x" else 64)
    return drawn.to(torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, str] = {}
        for recipe in RECIPES:
            layers = nn.ModuleDict()
            for kind, case in names(recipe):
                torch.manual_seed(len(kind))
                layer = KINDS[kind]()
                layers[f"{kind}_{case}"] = torch.compile(layer, backend="eager") if kind == "compiled" else layer
            setattr(self, recipe, layers)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = {}
        for recipe, how in RECIPES.items():
            for microbatch in (0, 1):
                with te.autocast(enabled=how is not None, recipe=how):
                    for name, layer in getattr(self, recipe).items():
                        if microbatch and not name.startswith("kept"):
                            continue
                        full = f"{recipe}.{name}"
                        try:
                            outputs[full] = call(name, layer, inputs[full], microbatch)
                        except Exception as error:
                            self.errors.setdefault(full, worded(error))
        return outputs


def call(name: str, layer: nn.Module, x: Tensor, microbatch: int) -> Tensor:
    if name.startswith("experts"):
        return layer(x, [ROWS // 2, ROWS // 2])
    if name.startswith("kept"):
        return layer(x, is_first_microbatch=microbatch == 0)
    return te.checkpoint(layer, x) if name.startswith("again") else layer(x)


def worded(error: Exception) -> str:
    traceback.print_exc()
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def read(quantizer: Any, x: Tensor) -> Tensor:
    """What the codes stand for that a copy of the quantizer makes."""
    mine = quantizer.copy()
    if hasattr(mine, "scale") and hasattr(mine, "amax"):
        mine.scale, mine.amax = mine.scale.clone(), mine.amax.clone()
    mine.internal = False
    mine.set_usage(rowwise=True, columnwise=False)
    with torch.no_grad():
        return mine(x.detach().contiguous()).dequantize(dtype=x.dtype)


class Reading:
    """What the plain layer's operands are in FP8, by the scales of their own step."""

    def __init__(self, net: Net) -> None:
        self.seen: dict[str, dict[str, Tensor]] = {}
        for recipe in ("delayed", "current", "blockwise"):
            getattr(net, recipe)["linear_plain"].register_forward_hook(partial(self._called, recipe))

    def _called(self, recipe: str, layer: Any, args: Any, y: Tensor) -> None:
        seen = self.seen[recipe] = {}
        forward, backward = layer.quantizers["scaling_fwd"], layer.quantizers["scaling_bwd"]
        seen["x"], seen["w"] = read(forward[0], args[0]), read(forward[1], layer.weight)
        y.register_hook(lambda dy: seen.__setitem__("dy", read(backward[0], dy)))


def products(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """By TransformerEngine's own BF16 layer."""
    layer = KINDS["linear"]()
    with torch.no_grad():
        layer.weight.copy_(w)
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"fprop": y.detach().cpu(), "dgrad": x.grad.cpu(), "wgrad": layer.weight.grad.cpu().flatten()}


def step_of(net: Net, reading: Reading, step: int) -> dict[str, Any]:
    inputs = {
        f"{recipe}.{kind}_{case}": drawn(kind, step, "x").requires_grad_()
        for recipe in RECIPES
        for kind, case in names(recipe)
    }
    outputs = net(inputs)
    found: dict[str, Any] = {}
    for name, y in reversed(outputs.items()):
        layer = net.get_submodule(name)
        try:
            y.backward(drawn(name.split(".")[1].split("_")[0], step, "dy"))
            grads = {n.removeprefix("_orig_mod."): p.grad.cpu() for n, p in layer.named_parameters()}
            weights = [g.flatten() for n, g in grads.items() if "weight" in n and "norm" not in n]
            others = [g.flatten() for n, g in grads.items() if "weight" not in n or "norm" in n]
            found[name] = {
                "fprop": y.detach().cpu(),
                "dgrad": inputs[name].grad.cpu(),
                "wgrad": torch.cat(weights),
                "others": torch.cat(others) if others else torch.zeros(0),
            }
        except Exception as error:
            net.errors.setdefault(name, "backward: " + worded(error))
    for recipe, codes in reading.seen.items():
        dy = drawn("linear", step, "dy")
        if len(codes) == 3:
            found[f"{recipe}: codes"] = products(codes["x"], codes["w"], codes["dy"])
            found[f"{recipe}: operand"] = products(codes["x"], codes["w"], dy)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    reading, steps = Reading(net), []
    for step in range(STEPS):
        steps.append(step_of(net, reading, step))
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"steps": steps, "errors": net.errors}, folder / "made.pt")


if __name__ == "__main__":
    main()
