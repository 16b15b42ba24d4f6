"""Which of how many this process is, and which start of them: as its process group has it, or a launcher told it."""

from __future__ import annotations

import os

import torch.distributed as dist

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def rank_of_this_process() -> int:
    """The rank that this process has in the program's process group, or that a launcher gave it; 0 without either.

    >>> rank_of_this_process()
    0
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    for name in RANKS:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def world_of_this_process() -> int:
    """How many ranks train together with this process, it included, as its process group or a launcher has it.

    >>> world_of_this_process()
    1
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    sizes = [os.environ.get(name, "") for name in SIZES]
    return max([int(size) for size in sizes if size.isdigit()], default=1)


def times_started_again() -> int:
    """How often torch's elastic launcher has started this rank before.

    >>> times_started_again()
    0
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0
