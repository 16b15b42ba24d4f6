"""A text that every Python has, as tokens: one per character; where to train on it, and how to end."""

import inspect
import os
import textwrap
import time

import torch


def pieces(length=32, count=64):
    """[count, length] token ids below 128; a longer training has COUNT of them."""
    count = int(os.environ.get("COUNT", count))
    codes = torch.tensor([ord(c) % 128 for c in inspect.getsource(textwrap)])
    return codes[: length * count].reshape(count, length)


def place():
    """This rank's device: the CPU, or a GPU of its own where DEVICE says "cuda"."""
    if os.environ.get("DEVICE", "cpu") == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def leave():
    """End the process group, once gloo's threads are through with the last collective.

    Each lets go of what torch's backward left with it (a context of Python's), and wants Python's lock for that; but as
    the group is taken apart they are waited for with that lock, for ever (torch 2.13, docs/ranks.md).
    """
    time.sleep(0.2)
    torch.distributed.destroy_process_group()
