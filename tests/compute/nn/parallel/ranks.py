"""A script of this folder on several ranks, each a fork: what every one of them saved."""

import contextlib
import sys
from pathlib import Path

import torch
from tests.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def play(warm_python, folder, script, world=2):
    """Everything that the script's ranks gave to `torch.save(..., "rankR.pt")`, by rank."""
    import os

    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            said = stack.enter_context((folder / f"said{rank}").open("wb"))
            env = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [sys.executable, HERE / script]
            ranks.append(warm_python.popen(words, cwd=folder, env=env, stdout=said, stderr=said))
        codes = [rank.wait(120) for rank in ranks]
    assert codes == [0] * world, f"{codes}\n" + "\n".join((folder / f"said{rank}").read_text() for rank in range(world))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
