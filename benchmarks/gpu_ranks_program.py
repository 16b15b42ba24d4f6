"""Training on two ranks in plain PyTorch, for `gpu_check_ranks`, which has it watched; knows nothing of narrowgauge.

ddp, fsdp2     a small model, each rank its own batches; what its layers saw in the last step is saved
sites          2,000 layers; says which collectives anybody but torch's own group started
amax           as ddp, with the largest numbers that its layers saw before the last step
late, gone     each rank a model of its own; rank 1 sleeps, or is killed
between        so, but rank 1 is killed after it has promised to merge a step: here narrowgauge is reached into
first          so, of the first step that ranks merge
split          one process, a model on two GPUs
backward       one process, every weight steps as soon as its gradient is there

torchrun --nproc-per-node 2 gpu_ranks_program.py CASE DEVICE FOLDER
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, SITES, SLEEP = 24, 2000, 8.0
LEAVES = {"between": 8, "first": 4}  # the step that rank 1 promises to merge, and does not
GONE = 5.0  # seconds without a sign of life until it counts as gone


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[M, 64] -> [M, 64]."""
        return self.down(torch.relu(self.up(x.to(self.up.weight.device))).to(self.down.weight.device))


class Many(nn.Module):
    """A row of small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(SITES // 3 + 1))

    def forward(self, x: Tensor) -> Tensor:
        """[M, 32] -> [M, 32]."""
        for layer in self.layers:
            x = x + layer(x) / 32
        return x


def keep(model: nn.Module, into: dict[str, Tensor]) -> None:
    """From now on what the layers see is kept, by the program's own hooks."""
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue

        def saw(layer: Any, args: Any, y: Tensor, name: str = name) -> None:
            whole = layer.weight.full_tensor() if hasattr(layer.weight, "full_tensor") else layer.weight
            into[f"{name}:input"], into[f"{name}:weight"] = args[0].detach().cpu().clone(), whole.detach().cpu().clone()
            y.register_hook(lambda dy: into.__setitem__(f"{name}:grad_output", dy.detach().cpu().clone()))

        layer.register_forward_hook(saw)


def keep_largest(model: nn.Module, into: dict[str, float]) -> None:
    """The same of the largest magnitudes until now."""

    def larger(key: str, tensor: Tensor) -> None:
        into[key] = max(into.get(key, 0.0), float(tensor.detach().abs().max()))

    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue

        def saw(layer: Any, args: Any, y: Tensor, name: str = name) -> None:
            larger(f"{name}:input", args[0])
            larger(f"{name}:weight", layer.weight)
            y.register_hook(lambda dy: larger(f"{name}:grad_output", dy))

        layer.register_forward_hook(saw)


def leave_between(rank: int, step: int) -> None:
    """Have rank 1 killed where it would join the gather of this step, to which it has agreed."""
    from narrowgauge.session.ranks import together

    changed: Any = together
    changed.BEAT, changed.GONE = 0.5, GONE
    gather = changed.Together.gather

    def leaves(self: Any, mine: Any, *rest: Any) -> None:
        if mine.step == step and rank == 1:
            torch.cuda.synchronize() if torch.cuda.is_available() else time.sleep(1)  # earlier gathers have ended
            os.kill(os.getpid(), signal.SIGKILL)
        gather(self, mine, *rest)

    changed.Together.gather = leaves


def step_in_backward(model: nn.Module) -> None:
    """Every weight has an optimizer of its own, which steps in the backward pass."""
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)


def train(
    model: nn.Module, width: int, device: torch.device, rank: int, steps: int, seconds: list[float], together: int = 0
) -> None:
    """So many steps, the first with a barrier behind each; how long each took."""
    optimizer = (
        None
        if any(p._post_accumulate_grad_hooks for p in model.parameters())
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        began = time.perf_counter()
        x = torch.randn(48 + 16 * rank, width, generator=draw).to(device)
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if len(seconds) < together:
            dist.barrier()
        seconds.append(time.perf_counter() - began)


def counting() -> Counter[str]:
    """Collectives of groups that are made of torch.distributed's own classes: not those of init_process_group."""
    started: Counter[str] = Counter()
    for kind in ("ProcessGroupNCCL", "ProcessGroupGloo"):
        base: Any = getattr(dist, kind, None)
        if base is None:
            continue

        def told(name: str, base: Any = base) -> Any:
            def collective(self: Any, *args: Any) -> Any:
                started[name] += 1
                return getattr(base, name)(self, *args)

            return collective

        names = ("allgather", "allreduce", "broadcast", "reduce", "barrier", "alltoall", "scatter", "gather")
        setattr(dist, kind, type(kind, (base,), {name: told(name) for name in names if hasattr(base, name)}))
    return started


def main() -> None:
    case, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.manual_seed(1)
    seconds: list[float] = []
    seen: dict[str, Tensor] = {}
    started = counting()
    # Registered before anybody else's, so run after theirs: with what the end of the process starts.
    atexit.register(lambda: (folder / f"started{rank}.json").write_text(json.dumps(started)))
    if kind == "cuda":
        torch.cuda.set_device(device)
    if case in ("split", "backward"):
        model: nn.Module = Model().to(device)
        if kind == "cuda" and case == "split":
            model.down.to("cuda:1")
        if case == "backward":
            step_in_backward(model)
        train(model, 64, device, rank, STEPS - 1, seconds)
        keep(model, seen)
        train(model, 64, device, rank, 1, seconds)
        torch.save(seen, folder / f"seen{rank}.pt")
        return
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if case in ("late", "gone", *LEAVES):
        model = Model().to(device)
        if case in LEAVES:
            leave_between(rank, LEAVES[case])
        train(model, 64, device, rank, STEPS // 2, seconds, together=LEAVES[case] + 2 if case in LEAVES else 0)
        if rank == 1 and case == "gone":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(SLEEP)
        train(model, 64, device, rank, STEPS, seconds)
    else:
        plain: nn.Module = Many() if case == "sites" else Model()
        plain.to(device)
        if case == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(kind, (2,))
            for part in (plain.up, plain.down, plain):
                fully_shard(part, mesh=mesh)
            model = plain
        else:
            model = nn.parallel.DistributedDataParallel(plain, device_ids=[rank] if kind == "cuda" else None)
        width, largest = 32 if case == "sites" else 64, dict[str, float]()
        if case == "amax":
            keep_largest(plain, largest)
        train(model, width, device, rank, STEPS - 1, seconds)
        (folder / f"largest{rank}.json").write_text(json.dumps(largest))
        if case != "sites":
            keep(plain, seen)
        train(model, width, device, rank, 1, seconds)
        torch.save(seen, folder / f"seen{rank}.pt")
    (folder / f"said{rank}.json").write_text(json.dumps(seconds))
    if case in ("ddp", "fsdp2", "sites", "amax"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
