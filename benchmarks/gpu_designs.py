"""Designs of the compiled FP8 step side by side: what is saved of inputs, who makes the amax, against BF16 and a peer.

python -m benchmarks.gpu_designs 8b-slice bf16,torchao:tensorwise,current,current+codes,delayed

Of each: the median of 20 steps, their peak memory, and where one profiled step's time went. Variants are run one after
the other, so only ratios within one call count, and those to a percent. `narrowgauge bench step` takes turns.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from benchmarks.record import record
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import narrowgauge as ng
from narrowgauge.scripts.gpt import SIZES, Llama, Size

VOCAB = 32768
KINDS = {
    "gemm": ("nvjet", "gemm", "cutlass"),
    "attention": ("fmha", "flash", "sdpa"),
    "optimizer": ("multi_tensor", "adam"),
    "quantize": ("_cast", "_amax", "_tiles", "_squares", "_rows", "_watched", "_whole_rows"),
}


def convert(model: nn.Module, variant: str) -> None:
    """BF16 stays; `torchao:RECIPE` is the peer's; else RECIPE, with `+codes` saving codes of inputs."""
    if variant.startswith("torchao:"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(variant.partition(":")[2])
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    elif variant != "bf16":
        recipe, _, option = variant.partition("+")
        ng.convert(model, recipe=recipe, skip=["lm_head"], save_codes=option == "codes")


def stepper(size: Size, variant: str) -> Callable[[], Tensor]:
    """One training step of the packaged Llama: BF16 weights, fused AdamW, synthetic tokens."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = Llama(size)
    model = model.bfloat16()
    convert(model, variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(VOCAB, (size.batch, size.seq + 1), device="cuda")

    @torch.compile
    def loss_of(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def step() -> Tensor:
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def phases(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of one profiled step by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    spent = dict.fromkeys([*KINDS, "rest"], 0.0)
    for event in profiled.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "rest")
        spent[kind] += event.self_device_time_total / 1e3
    return {kind: round(ms, 1) for kind, ms in spent.items()}


def measure(size: Size, variant: str) -> dict[str, object]:
    """One row."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    step = stepper(size, variant)
    for _ in range(4):
        loss = step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    taken = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    row = {"variant": variant, "ms": round(statistics.median(taken), 1), "peak GiB": round(peak, 2)}
    return row | phases(step) | {"loss": round(loss.item(), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=("8b-slice", "1b"))
    parser.add_argument("variants", help="comma-separated")
    args = parser.parse_args()
    size = replace(SIZES[args.size], vocab=VOCAB)
    rows = [measure(size, variant) for variant in args.variants.split(",")]
    record(f"designs_{args.size}", {"size": args.size, "vocab": VOCAB, "variants": args.variants}, rows)


if __name__ == "__main__":
    main()
