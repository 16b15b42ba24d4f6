"""Converted models over two GPUs, by NCCL: FSDP2 and tensor parallelism beside the same model in one piece.

    python benchmarks/gpu_check_sharded.py           starts two ranks; on a CPU, by gloo, with smaller layers

    losses     |sharded - one piece| / one piece, the largest of all steps
    weights    the same of the norm, after the last step, the largest of all parameters
    scales     whether both ranks have the same ones, bit by bit (recipes that keep them)
    peak MiB   allocated at most in a step after the first, on rank 0: FSDP2 plain, and converted

FSDP2's ranks have a batch each; the model in one piece has both, one after the other, and its gradients are halved.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import narrowgauge as ng
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED, ROWWISE

CUDA = torch.cuda.is_available()
DIM, TOKENS, BLOCKS = (4096, 4096, 8) if CUDA else (256, 64, 2)
DTYPE = torch.bfloat16 if CUDA else torch.float32
STEPS = 4
RECIPES = {"current": CURRENT, "delayed": DELAYED.with_(initial="one"), "rowwise": ROWWISE, "blockwise": BLOCKWISE}


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """[M, DIM] to the same."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def made(device: torch.device) -> nn.Sequential:
    """The same model every time."""
    torch.manual_seed(1)
    with torch.device(device):
        return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(DTYPE)


def batch(step: int, who: int, device: torch.device) -> Tensor:
    """The same on every machine."""
    generator = torch.Generator().manual_seed(10 * step + who)
    return torch.randn(TOKENS, DIM, generator=generator).to(device, DTYPE)


def train(model: nn.Module, whose: list[int], device: torch.device) -> tuple[list[list[float]], float]:
    """Losses by step and batch, and the peak of memory in MiB from the second step on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        if CUDA and step == 1:
            torch.cuda.reset_peak_memory_stats()
        here = []
        for who in whose:
            loss = model(batch(step, who, device)).float().square().mean()
            loss.backward()
            here.append(loss.item())
        for p in model.parameters():
            if p.grad is not None and len(whose) > 1:
                p.grad /= len(whose)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(here)
    return losses, torch.cuda.max_memory_allocated() / 2**20 if CUDA else 0.0


def check(kind: str, name: str, device: torch.device) -> str:
    """One kind of parallelism by one recipe; a line."""
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (2,))
    gc.collect()  # FSDP2 leaves circles behind, and their memory would count
    model = made(device)
    for block in model:
        if kind == "tensor":
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    if kind == "FSDP2":
        fully_shard(model, mesh=mesh)
    if name != "plain":
        ng.convert(model, RECIPES[name])
    losses, peak = train(model, [rank] if kind == "FSDP2" else [0], device)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in map(Tensor.detach, model.parameters())]
    state = ng.scaling_state(model) if name != "plain" else {}
    scales = [x.to(device) for key, x in state.items() if key.endswith("scale")]
    same = True
    for scale in scales:
        both = [torch.empty_like(scale) for _ in range(2)]
        dist.all_gather(both, scale)
        same = same and torch.equal(*both)
    del model
    whole = made(device)
    if name != "plain":
        ng.convert(whole, RECIPES[name])
    want, _ = train(whole, [0, 1] if kind == "FSDP2" else [0], device)
    mine = [row[rank if kind == "FSDP2" else 0] for row in want]
    off = max(abs(a[0] - b) / b for a, b in zip(losses, mine, strict=True))
    far = max(
        ((a - p.detach()).float().norm() / p.detach().float().norm()).item()
        for a, p in zip(weights, whole.parameters(), strict=True)
    )
    told = f"scales {'the same' if same else 'DIFFER'}" if scales else ""
    return f"{kind:7} {name:10} losses {off:8.1e}  weights {far:8.1e}  peak {peak:7.0f} MiB  {told}".rstrip()


def main() -> None:
    """All of them, on this rank; rank 0 writes."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    lines = [check(kind, name, device) for kind in ("FSDP2", "tensor") for name in ("plain", *RECIPES)]
    if rank == 0:
        print("\n".join(lines))
        if CUDA:
            from record import transcript

            transcript("gpu_check_sharded", "python benchmarks/gpu_check_sharded.py", lines)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if CUDA else "gloo")
        main()
        dist.destroy_process_group()
    else:
        port = ["--master-port", "29581", "--nproc-per-node", "2"]
        os.chdir(Path(__file__).parent.parent)
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *port, __file__])
