"""A training loop of TransformerEngine's, for `gpu_check_transformer_engine`; knows nothing of narrowgauge.

What its first layer's input and weight became in FP8 in the last step, by TransformerEngine's own quantizers, is saved.

    python gpu_te_program.py RECIPE STEPS FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes

RECIPES: dict[str, Any] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
}
WIDTH = 256


def facts(x: Tensor, quantizer: Any) -> dict[str, float]:
    """Of a tensor, and of what a copy of the quantizer makes of it: by the formulas, in float64."""
    mine = quantizer.copy()
    if hasattr(mine, "scale") and hasattr(mine, "amax"):
        mine.scale, mine.amax = mine.scale.clone(), mine.amax.clone()
    mine.internal = False
    wide = x.detach().double()
    error = mine(x.detach().contiguous()).dequantize().double() - wide
    return {
        "numel": x.numel(),
        "amax": float(wide.abs().max()),
        "std": float(wide.std(correction=0)),
        "sqnr_db": 10 * math.log10(float(wide.square().sum() / error.square().sum())),
    }


def main() -> None:
    recipe, steps, folder = RECIPES[sys.argv[1]](), int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    bf16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
    model = nn.Sequential(
        te.Linear(WIDTH, WIDTH, **bf16),
        te.LayerNormLinear(WIDTH, WIDTH, **bf16),
        te.LayerNormMLP(WIDTH, 4 * WIDTH, **bf16),
        te.Linear(WIDTH, WIDTH, **bf16),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, losses, seen = model[0], [], {}

    def saw(layer: Any, args: Any, y: Tensor) -> None:
        for role, place, t in (("input", 0, args[0]), ("weight", 1, layer.weight)):
            seen[f"0:{role}"] = facts(t, layer.quantizers["scaling_fwd"][place])

    for step in range(steps):
        if step + 1 == steps:
            first.register_forward_hook(saw)
        x = torch.randn(512, WIDTH, device="cuda", dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        loss = (y.float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (folder / "losses.json").write_text(json.dumps(losses))
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
