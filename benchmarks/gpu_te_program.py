"""A training loop of TransformerEngine's, for `gpu_check_transformer_engine`; knows nothing of narrowgauge.

What its first layer's input and weight became in FP8 in the last step, by TransformerEngine's own quantizers, is saved.
The delayed recipe takes the newest amax alone, so that every step has another scale: with the largest of a long history
one that is an update early or late would be the same.

    python gpu_te_program.py RECIPE STEPS FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes

RECIPES: dict[str, Any] = {
    "delayed": partial(recipes.DelayedScaling, amax_history_len=4, amax_compute_algo="most_recent"),
    "current": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
}
WIDTH = 256


def facts(x: Tensor, quantizer: Any) -> dict[str, float]:
    """Of a tensor, and of what a copy of the quantizer makes of it: by the formulas, in float64.

    Codes are dequantized into float32. `dequantize()` by itself rounds each value to x's BF16, as no product does, and
    where the scale is no power of two that moves the SQNR by up to 0.1 dB (`te_draw`).
    """
    mine = quantizer.copy()
    if hasattr(mine, "scale") and hasattr(mine, "amax"):
        mine.scale, mine.amax = mine.scale.clone(), mine.amax.clone()
    mine.internal = False
    wide = x.detach().double()
    made = mine(x.detach().contiguous())
    error = made.dequantize(dtype=torch.float32).double() - wide
    found = {
        "numel": x.numel(),
        "amax": float(wide.abs().max()),
        "std": float(wide.std(correction=0)),
        "sqnr_db": 10 * math.log10(float(wide.square().sum() / error.square().sum())),
    }
    if hasattr(made, "_scale_inv"):  # one for the tensor; blocks have padding among theirs
        found["scale_max"] = float(made._scale_inv)
    return found


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
