"""TransformerEngine's own codes beside those that the watch counts, layer by layer and recipe by recipe; needs a GPU.

For every operand that leaves its layer: the codes that the layer's quantizer makes (a copy of it, so that its history
is left alone) against ours by the rule read from it; and what was recorded against the tensors that hooks caught.

    python -m benchmarks.gpu_check_transformer_engine
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.compute.quant import quantize
from narrowgauge.observe.stats import Collector
from narrowgauge.session.plain_sites import PlainSites
from narrowgauge.session.sites.te_quantizers import rule_of

COLUMNS = ("amax", "std", "sqnr_db", "gain")


class Rows:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    def add_tensors(self, step: int, sites: list[str], columns: dict[str, Any]) -> None:
        for i, site in enumerate(sites):
            self.rows[site] = {name: float(values[i]) for name, values in columns.items()}

    def add_event(self, step: int, kind: str, message: str, site: str | None = None, **data: Any) -> None:
        print("EVENT", kind, message, site)


def their_codes(quantizer: Any, x: Tensor) -> Tensor:
    """The bytes that a copy of the quantizer makes; its amax goes into memory of our own."""
    mine = quantizer.copy()
    if hasattr(mine, "amax"):
        mine.amax, mine.scale = mine.amax.clone(), mine.scale.clone()
    mine.internal = False
    made = mine(x.contiguous())
    data = made._data if hasattr(made, "_data") else made._rowwise_data
    return data.view(torch.uint8).reshape(x.shape)


def check(name: str, layer: nn.Module, recipe: Any, te: Any, *args: Any) -> None:
    """One recorded step after two that fill the histories."""
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    writer = Rows()
    collector = Collector(writer, every=1)
    model = nn.ModuleDict({"l": layer})
    sites = PlainSites("current", eager=True, training=lambda: True)
    sites.add(model, collector)
    seen: dict[str, tuple[Tensor, Any]] = {}

    def step(recording: bool) -> None:
        with te.autocast(enabled=True, recipe=recipe):
            y = layer(x, *args)
            if recording:
                weight = getattr(layer, "weight", None)
                outside = None if "LayerNorm" in type(layer).__name__ else x  # what is normed inside cannot be caught
                for role, place, t in (("input", 0, outside), ("weight", 1, weight)):
                    if t is not None:
                        seen[role] = t.detach(), copy_of(layer.quantizers["scaling_fwd"][place])
        if recording:
            y.register_hook(lambda dy: seen.__setitem__("grad_output", (dy.detach(), copy_of(last(layer)))))
        (y.float().cos().sum() / 100).backward()

    for _ in range(2):
        step(False)
    collector.begin_step(1)
    sites.begin()
    step(True)
    sites.end()
    collector.flush()
    torch.cuda.synchronize()
    for role, (t, quantizer) in seen.items():
        site = f"l:{role}"
        if site not in writer.rows:
            continue
        rule = rule_of(quantizer, role, 0)
        if isinstance(rule, str):
            print(f"{name:40} {role:12} {rule}")
            continue
        scales = {} if rule.given is None else {"scale": rule.given.scale, "inv_scale": rule.given.inv_scale}
        q = quantize(t, rule.operand.fmt, rule.operand.granularity, scaling=rule.operand.scaling, **scales)
        differ = int((q.codes.view(torch.uint8) != their_codes(quantizer, t)).sum())
        want = ng.measure(t, q)
        worst = max(abs(writer.rows[site][c] - want[c]) / max(abs(want[c]), 1e-9) for c in COLUMNS)
        ratio = writer.rows[site]["amax_ratio"]
        codes = f"codes that differ {differ:6} of {t.numel()}"
        print(f"{name:40} {role:12} {codes}  worst column {worst:.1e}  amax ratio {ratio:.3f}")
    print(f"{name:40} sites {sorted(writer.rows)}  {' '.join(sites.notes)}")


def last(layer: Any) -> Any:
    """The quantizer of the gradient that arrives from outside."""
    return layer.quantizers["scaling_bwd"][2 if "MLP" in type(layer).__name__ else 0]


def copy_of(quantizer: Any) -> Any:
    """A quantizer as it is now."""
    mine = copy.copy(quantizer)
    for name in ("scale", "amax"):
        if isinstance(getattr(mine, name, None), Tensor):
            setattr(mine, name, getattr(mine, name).clone())
    return mine


def main() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    torch.manual_seed(0)
    for recipe in (
        recipes.DelayedScaling(amax_history_len=4),
        recipes.Float8CurrentScaling(),
        recipes.Float8BlockScaling(),
    ):
        kind, bf16 = type(recipe).__name__, {"params_dtype": torch.bfloat16, "device": "cuda"}
        check(f"{kind} Linear", te.Linear(128, 256, **bf16), recipe, te)
        check(f"{kind} LayerNormLinear", te.LayerNormLinear(128, 256, **bf16), recipe, te)
        check(f"{kind} LayerNormMLP", te.LayerNormMLP(128, 512, **bf16), recipe, te)
        check(f"{kind} GroupedLinear", te.GroupedLinear(2, 128, 256, **bf16), recipe, te, [128, 128])


if __name__ == "__main__":
    main()
