"""Can it be measured that a program is watched, in its steps that are not recorded?

    alone       a block of the program's steps
    again       another one, the same: what blocks differ by where nothing differs
    loss        a block under `ng.watch`, none of whose steps is recorded, with `scalars = "loss"`: rows are brief,
                as by default once it is known that steps are short
    all         the same with `scalars = "all"`: each row is whole, as by default where steps are long
    auto        the same by default, as behind the first steps: brief rows or whole ones, by how long steps take
    recorded    the same with `scalars = "recorded"`: there is no row

All take turns, in another order each round. Told are the medians over rounds of a block's median step over that of the
round's `alone`, less 1, in percent, each with the interval that holds the median of as many rounds drawn from these in
95 of 100 draws. What is told of a setting is measurable where its interval lies above that of `again`.

A block's first steps are not counted: opening a run reads all weights once.

On a CPU each block has tensors beside it, as many and as large as chance has it: where a program's own tensors lie
makes a difference of up to 9 % in steps of 4 ms, which would be told as that of its watching otherwise. On a GPU each
block is timed as a whole, from one idle GPU to the next.

A program trains otherwise where its name says so: `tiny+pair`.

    +deep       it has eight times the layers (on a GPU)
    +compiled   its model is compiled in place
    +scaler     the loss is scaled by a gradient scaler
    +unclipped  its gradients are not clipped
    +pair       matrices are trained by one optimizer, all else by another
    +sam        of layers: each batch has two backward passes, the first to find where the second looks
    +reference  of layers: the model is called without gradients, too, on the batch that it trains on
    +closure    of layers: its optimizer is given a closure, which it calls once, as Lightning does
    +lbfgs      of layers: its optimizer tries how far to go, by a closure that it calls four times
    +vector     of layers: backward is called on no number, but with gradients
    +beside     another model like it trains in turn with it, and it alone is watched
    +ranks      under torchrun: by DistributedDataParallel, each rank a GPU; rank 0 tells

    python -m benchmarks.watch_measurable [--sizes tiny layers-1024 ...] [--rounds 24] [--steps 8]
        [--settings loss all auto recorded] [--device cuda]
    torchrun --nproc-per-node 2 -m benchmarks.watch_measurable --sizes small+ranks --device cuda
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.record import record
from benchmarks.watch_cost_cpu import NEVER, program

import narrowgauge as ng
from narrowgauge.bench.shapes import sized
from narrowgauge.observe.stats import host
from narrowgauge.scripts import gpt
from narrowgauge.session.steps import pace

WARM = 3  # steps of each block that are not counted
SIZES = ("layers-512", "tiny", "layers-512-float32", "layers-1024", "small")
DRAWS, DEEP = 2000, 8
BESIDE = 1 << 18  # elements of what lies beside a block, at most
_chance = random.Random(0)
Train = Callable[[], None]
Loss = Callable[[torch.nn.Module], torch.Tensor]


def on_cpu(name: str) -> tuple[torch.nn.Module, Loss]:
    """A model and its loss on new data, of that model alone."""
    model, loss, _ = program(name)
    return model, lambda _: loss()


def on_gpu(name: str) -> tuple[torch.nn.Module, Loss]:
    """The same of the packaged Llama, of a size of `narrowgauge bench`."""
    base, *ways = name.split("+")
    size = sized(base)
    if "deep" in ways:
        size = replace(size, layers=DEEP * size.layers)
    with torch.device("cuda"):
        model = gpt.Llama(size)

    def loss(called: torch.nn.Module) -> torch.Tensor:
        tokens, targets = torch.randint(256, (2, size.batch, size.seq), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            return gpt.next_byte_loss(called, tokens, targets)

    return model, loss


def otherwise(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    """A training step of layers in which they are called more than once on its batch, or have no loss."""
    base, *ways = name.split("+")
    width, parameters = int(base.split("-")[1]), [*model.parameters()]

    def called(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not base.endswith("float32")):
            return model(x).float()

    def tries() -> None:
        x = torch.randn(width, width)

        def closure() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = called(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            return loss

        optimizer.step(closure)
        optimizer.zero_grad(set_to_none=True)

    def hands_on() -> None:
        y = called(torch.randn(width, width))
        y.backward(y.detach() / y.numel())
        stepped()

    def stepped() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def sharp() -> None:
        x = torch.randn(width, width)
        called(x).square().mean().backward()
        steepest = [p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, steepest, alpha=0.05)
        optimizer.zero_grad(set_to_none=True)
        called(x).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, steepest, alpha=0.05)
        stepped()

    def refers() -> None:
        x = torch.randn(width, width)
        y = called(x)
        with torch.no_grad():
            reference = called(x)
        (y - reference + y.square()).mean().backward()
        stepped()

    kinds = {"sam": sharp, "reference": refers, "closure": tries, "lbfgs": tries, "vector": hands_on}
    return kinds[ways[0]]


def training(name: str, device: str) -> Train:
    """One of a program's training steps."""
    return watched(name, device)[0]


def watched(name: str, device: str) -> tuple[Train, tuple[torch.nn.Module, ...]]:
    """The same, and the model that is watched, if it is not the whole program."""
    if name.endswith("+beside"):
        model, train = trained(name.removesuffix("+beside"), device)
        _, other = trained(name.removesuffix("+beside"), device)

        def both() -> None:
            train()
            other()

        return both, (model,)
    return trained(name, device)[1], ()


def trained(name: str, device: str) -> tuple[torch.nn.Module, Train]:
    """A model, and one of its training steps."""
    torch.manual_seed(0)
    base, *ways = name.split("+")
    model, loss = on_cpu(base) if device == "cpu" else on_gpu(name)
    optimizers = [gpt.make_optimizer(model, 1e-3, torch.device(device))]
    if "pair" in ways:
        matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is big] for big in (True, False))
        optimizers = [torch.optim.SGD(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
    if "lbfgs" in ways:
        optimizers = [torch.optim.LBFGS(model.parameters(), lr=1e-4, max_iter=4, history_size=4)]
    scaler = torch.amp.GradScaler(device, enabled="scaler" in ways)
    if {"sam", "reference", "closure", "lbfgs", "vector"} & {*ways}:
        return model, otherwise(name, model, *optimizers)
    called = torch.nn.parallel.DistributedDataParallel(model) if "ranks" in ways else model
    if "compiled" in ways:
        called.compile()

    def train() -> None:
        scaler.scale(loss(called)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def plainly() -> None:
        loss(called).backward()
        if "unclipped" not in ways:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    return model, train if "scaler" in ways else plainly


def block(train: Train, steps: int, device: str) -> float:
    """Milliseconds of a step of this block behind its first ones: the median, or on a GPU the mean."""
    beside = [torch.empty(_chance.randrange(BESIDE)) for _ in range(_chance.randrange(12) if device == "cpu" else 0)]
    for _ in range(WARM):
        train()
    if device == "cpu":
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            train()
            found.append(time.perf_counter() - began)
        del beside
        return 1e3 * statistics.median(found)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        train()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / steps


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between what medians of as many, drawn from these, lie in 95 of 100 draws."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return statistics.median(values), medians[DRAWS // 40], medians[-DRAWS // 40 - 1]


def row_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A program's row."""
    train, only = watched(name, args.device)
    took: dict[str, list[float]] = {kind: [] for kind in ("alone", "again", *args.settings)}
    with tempfile.TemporaryDirectory() as folder:
        folder = _rank_0s(folder)
        for setting in args.settings:
            (Path(folder) / f"{setting}.toml").write_text(f'[watch]\nscalars = "{setting}"\n')
        for number in range(args.rounds + 1):
            kinds = list(took)
            turn = number % len(kinds)
            for kind in kinds[turn:] + kinds[:turn]:
                around: AbstractContextManager[object] = nullcontext()
                if kind in args.settings:
                    settings = Path(folder) / f"{kind}.toml"
                    around = ng.watch(*only, out=Path(folder) / f"{number}_{kind}", every=NEVER, config=settings)
                _rank_0s("")  # all begin at once
                with around:
                    ms = block(train, args.steps, args.device)
                if number:  # the first round compiles and imports
                    took[kind].append(ms)
        _rank_0s("")  # whose folder it is
    row: dict[str, Any] = {"program": name, "alone_ms": round(statistics.median(took["alone"]), 2)}
    for kind in ("again", *args.settings):
        median, low, high = interval([100 * (b / a - 1) for a, b in zip(took["alone"], took[kind], strict=True)])
        row |= {f"{kind}_pct": round(median, 2), f"{kind}_from": round(low, 2), f"{kind}_to": round(high, 2)}
    return row


def _rank_0s(what: str) -> str:
    """The same of rank 0, where there are several; they have met then."""
    if not dist.is_initialized():
        return what
    told = [what]
    dist.broadcast_object_list(told)
    return str(told[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--settings", nargs="+", default=("loss", "all", "recorded"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    host.wait()
    pace.SETTLED = 0
    if args.device == "cpu":
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    rows = [row_of(name, args) for name in args.sizes]
    settings = {"rounds": args.rounds, "steps": args.steps, "threads": torch.get_num_threads()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        record("watch_measurable", settings, rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
