"""All of TransformerEngine's layers in one loop, for `gpu_check_transformer_engine`; knows nothing of narrowgauge.

Two microbatches to a step, one block checkpointed, two experts in one layer. Inputs grow and shrink from step to step:
a delayed scale, of the newest amax alone, is far off then, which one of now is not. In every second step what each
layer multiplied is summed, in FP8 by a copy of its own quantizers (`gpu_operand_sums`).

    python gpu_te_loop_program.py RECIPE FOLDER

The histories are long: an amax of 0 is written into them as often as an autocast ends without a layer's forward, which
a recomputation's does.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from benchmarks.gpu_operand_sums import Sums, normed, own
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes

RECIPES: dict[str, Any] = {
    "delayed": partial(recipes.DelayedScaling, amax_history_len=16, amax_compute_algo="most_recent"),
    "current": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
}
STEPS, EVERY, MICROBATCHES, ROWS, WIDTH = 8, 2, 2, 512, 256
GROWN, SHRUNK = 6, 8  # steps
SIZES = {GROWN: 8.0, SHRUNK: 2.0**-15}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = {"params_dtype": torch.bfloat16, "device": DEVICE}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(WIDTH, WIDTH, **BF16)
        self.norm = te.LayerNormLinear(WIDTH, WIDTH, **BF16)
        self.mlp = te.LayerNormMLP(WIDTH, 4 * WIDTH, **BF16)
        self.experts = te.GroupedLinear(2, WIDTH, WIDTH, **BF16)
        self.again = nn.Sequential(te.Linear(WIDTH, WIDTH, **BF16), te.Linear(WIDTH, WIDTH, **BF16))
        self.last = te.Linear(WIDTH, WIDTH, **BF16)

    def forward(self, x: Tensor) -> Tensor:
        """[ROWS, WIDTH] -> the same."""
        h = self.mlp(self.norm(self.first(x)))
        return self.last(te.checkpoint(self.again, self.experts(h, [ROWS // 2, ROWS // 2])))


class Looking:
    """Sums of what the layers multiply in the steps that are looked at."""

    def __init__(self, net: Net) -> None:
        self.seen: dict[int, dict[str, Sums]] = defaultdict(lambda: defaultdict(Sums))
        self.step = 0
        for name, layer in net.named_modules():
            if hasattr(layer, "quantizers"):
                layer.register_forward_hook(partial(self._called, name))

    def _called(self, name: str, layer: Any, args: Any, y: Tensor) -> None:
        if self.step % EVERY:
            return
        kind, x, parts = type(layer).__name__, args[0], []
        if kind == "GroupedLinear":
            parts = [(f"{name}.{i}", i, part, getattr(layer, f"weight{i}")) for i, part in enumerate(x.split(args[1]))]
        elif kind == "LayerNormMLP":
            parts = [(f"{name}.fc1", 0, normed(layer, x), layer.fc1_weight), (f"{name}.fc2", 1, None, layer.fc2_weight)]
        else:
            parts = [(name, 0, normed(layer, x) if kind == "LayerNormLinear" else x, layer.weight)]
        if torch._C._current_graph_task_id() == -1:  # a recomputed forward was seen when it ran first
            for part, gemm, rows, weight in parts:
                if rows is not None:
                    self._add(part, layer, "input", gemm, rows)
                if f"{part}:weight" not in self.seen[self.step]:
                    self._add(part, layer, "weight", gemm, weight)
        if y.requires_grad:
            seen = [(part, gemm) for part, gemm, *_ in parts if not part.endswith(".fc1")]
            y.register_hook(partial(self._arrived, layer, seen))

    def _arrived(self, layer: Any, parts: list[tuple[str, int]], dy: Tensor) -> None:
        for (part, gemm), rows in zip(parts, dy.detach().chunk(len(parts)), strict=True):
            self._add(part, layer, "grad_output", gemm, rows)

    def _add(self, part: str, layer: Any, role: str, gemm: int, x: Tensor) -> None:
        self.seen[self.step][f"{part}:{role}"].add(x, role, *own(layer, role, gemm))


def main() -> None:
    recipe, folder = RECIPES[sys.argv[1]](), Path(sys.argv[2])
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    looking, losses = Looking(net), []
    for step in range(1, STEPS + 1):
        looking.step, total = step, 0.0
        for _ in range(MICROBATCHES):
            x = (SIZES.get(step, 1.0) * torch.randn(ROWS, WIDTH, device=DEVICE)).to(torch.bfloat16)
            with te.autocast(enabled=True, recipe=recipe):
                y = net(x)
            loss = (y.float() - x.float()).square().sum()  # a first scale of 1 would flush a mean's gradients to zeros
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    (folder / "losses.json").write_text(json.dumps(losses))
    seen = {step: {site: sums.parts for site, sums in sites.items()} for step, sites in looking.seen.items()}
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
